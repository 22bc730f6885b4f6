//! The learnable sink of a layer.

use crate::functions::sink::try_learnable_sink;
use burn::module::Param;
use burn::tensor::Tensor;
use flash_dma_problem::AttentionError;

/// The output `[batch, n_heads, len, head_dim]` of an attention, whose LSE `[batch, n_heads, len]` goes with it, beside
/// a logit per head without a key.
pub(super) fn beside(
    (out, lse): (Tensor<4>, Tensor<3>),
    logits: &Param<Tensor<1>>,
) -> Result<Tensor<4>, AttentionError> {
    Ok(try_learnable_sink(out, lse, logits.val())?.0)
}
