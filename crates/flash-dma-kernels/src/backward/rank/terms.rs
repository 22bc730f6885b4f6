//! The change that trains the rank: adding a runner-up to a query's keys, or leaving a kept key out.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::sums::write_score;
use crate::math::ln_one_plus;
use crate::matrix::logit_scale::{sigmoid_of_power, softplus};
use crate::matrix::ptx::{at_most_zero, ex2, reciprocal};
use crate::pattern::intervals::ranked::RankedSource;
use cubecl::prelude::*;
use flash_dma_problem::OWN_OUTPUT_WEIGHT;

/// The inputs of a rank kernel in addition to the products of its pairs.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RankTerms {
    /// Contiguous `[batch, q_heads, q_len]`: LSE gradients, which the deltas have been reduced by; absent if zero.
    pub grad_lse: ComptimeOption<Box<[f32]>>,
    pub change: Change,
}

/// The launch argument of the gradients of the LSEs and of the change for the keys of `source`.
pub(crate) fn rank_terms(
    grad_lse: Option<&TensorBinding>,
    source: RankedSource,
) -> RankTermsLaunch {
    let grad_lse = grad_lse.map(|grad| grad.clone().into_buffer_arg());
    let change = match source {
        RankedSource::RunnersUp(_) => ChangeLaunch::new(1.0, ChangeKind::Added),
        RankedSource::Kept(_) => ChangeLaunch::new(1.0 + OWN_OUTPUT_WEIGHT, ChangeKind::LeftOut),
    };
    RankTermsLaunch::new(grad_lse.into(), change)
}

/// The kinds of change of a query's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ChangeKind {
    Added,
    LeftOut,
}

/// The change of a query's keys that trains a rank. The kind is not a `ComptimeOption` of the number, because a
/// kernel's stable hash, and so CubeCL's cache on disk, would not tell its presence from its absence.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Change {
    /// The weights of a query's keys plus its [`OWN_OUTPUT_WEIGHT`]; read if a key is left out.
    pub all: f32,
    #[cube(comptime)]
    pub kind: ChangeKind,
}

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

/// True if a launch adds to what an earlier one has written.
pub(crate) fn adds(kind: ChangeKind) -> bool {
    kind == ChangeKind::LeftOut
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
