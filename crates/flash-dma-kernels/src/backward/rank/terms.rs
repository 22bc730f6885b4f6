//! The weights of a [`Change`] by special-function instructions, and the writes of a rank's gradient.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::sums::write_score;
use crate::math::ln_one_plus;
use crate::matrix::logit_scale::{sigmoid_of_power, softplus};
use crate::matrix::ptx::{at_most_zero, ex2, reciprocal};
use crate::rank_terms::{Change, ChangeExpand, ChangeKind};
use cubecl::prelude::*;

#[cube]
impl Change {
    /// `log2` of the number from which a key's weight is computed, given by
    /// [`ExactLse::exponent`](crate::matrix::logit_scale::ExactLse). A kept key's is that of a probability, at most 0,
    /// though its logit may be recomputed higher than in the forward pass.
    pub(crate) fn above(&self, exponent: f32) -> f32 {
        match comptime!(self.kind) {
            ChangeKind::Added => exponent,
            ChangeKind::LeftOut => at_most_zero(exponent),
        }
    }

    /// The factor of `v - out` of a key with logit `x log(2)` above the LSE; two special-function instructions, NaN
    /// stays NaN.
    pub(crate) fn weight_of_power(&self, x: f32) -> f32 {
        match comptime!(self.kind) {
            ChangeKind::Added => sigmoid_of_power(x),
            // p / (all - p), and p = 2^x.
            ChangeKind::LeftOut => reciprocal(fma(self.all, ex2(-x), -1.0f32)),
        }
    }

    /// The key's part of the LSE, if its logit is `x` above it and its factor is `weight`.
    pub(crate) fn part_of_lse(&self, x: f32, weight: f32) -> f32 {
        match comptime!(self.kind) {
            ChangeKind::Added => softplus(x),
            ChangeKind::LeftOut => ln_one_plus(weight),
        }
    }
}

/// [`write_score`], or with `adds` an addition to the gradient that an earlier launch has written.
#[cube]
pub(crate) fn write_or_add(
    rank: &mut [f32],
    at: usize,
    sum: f32,
    #[comptime] adds: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let mut all = sum;
    if comptime!(adds && !bp.shared_keys) {
        all += rank[at];
    }
    write_score(rank, at, all, bp);
}
