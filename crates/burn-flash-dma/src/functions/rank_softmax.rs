//! What the ranks of a head gain, charged to all of them.

use burn::tensor::{FloatDType, Int, Tensor};
use flash_dma_problem::RankSoftmax;

/// The share of each key in what is charged to its head, `[batch, kv_heads, k_len]`, f32 like `scores`, whose values
/// these are: of the keys that have a finite score and are for `positions` (none below 1) kept by rank or runners-up.
pub(crate) fn shares(
    scores: &Tensor<3>,
    positions: Tensor<3, Int>,
    softmax: RankSoftmax,
) -> Tensor<3> {
    if scores.dims().contains(&0) {
        return scores.clone();
    }
    let logits = scores.clone() * softmax.inverse_temperature();
    let without = logits.clone().is_finite().bool_not();
    let logits = logits.mask_fill(without, f32::MIN);
    let above = logits.clone().max_dim(2);
    let weights = positions.clamp_min(0).cast(FloatDType::F32) * (logits - above).exp();
    let all = weights.clone().sum_dim(2);
    // Of a head none of whose keys is a candidate there is nothing to charge.
    let none = all.clone().equal_elem(0);
    weights / all.mask_fill(none, 1)
}

/// A rank whose gradient is that of `rank` less its share of the sum. Only the gradient of the result is of use.
pub(crate) fn charged(rank: Tensor<3>, shares: Option<Tensor<3>>) -> Tensor<3> {
    match shares {
        None => rank,
        Some(shares) => rank.clone() - (rank * shares).sum_dim(2),
    }
}
