//! What the rank learns by: runners-up that are added to a query's keys, or kept keys that are left out.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::sums::write_score;
use crate::matrix::logit_scale::{sigmoid_of_power, softplus};
use crate::matrix::ptx::{ex2, reciprocal};
use cubecl::prelude::*;
use flash_dma_problem::LeaveOneOut;

/// What a rank kernel knows beside the products of its pairs.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RankTerms {
    /// Contiguous `[batch, q_heads, q_len]`: what the deltas have been reduced by; zero if there are none.
    pub grad_lse: ComptimeOption<Box<[f32]>>,
    pub change: Change,
}

/// The launch argument of the gradients of the LSEs and of what kept keys learn; without that, of runners-up.
pub(crate) fn rank_terms(
    grad_lse: Option<&TensorBinding>,
    left_out: Option<LeaveOneOut>,
) -> RankTermsLaunch {
    let grad_lse = grad_lse.map(|grad| grad.clone().into_buffer_arg());
    let left_out = left_out.map(|how| LeftOutTermsLaunch::new(1.0 + how.besides()));
    RankTermsLaunch::new(grad_lse.into(), left_out.into())
}

/// The change of a query's keys by which a rank learns: a runner-up is added, or a kept key left out.
pub(crate) type Change = ComptimeOption<LeftOutTerms>;

/// See [`LeaveOneOut`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct LeftOutTerms {
    /// The weights of a query's keys and, besides, of its output.
    pub all: f32,
}

/// The same change, for a struct to own.
#[cube]
pub(crate) fn owned(change: &Change) -> Change {
    #[comptime]
    match change {
        ComptimeOption::Some(left_out) => {
            ComptimeOption::new_Some(LeftOutTerms { all: left_out.all })
        }
        ComptimeOption::None => ComptimeOption::new_None(),
    }
}

/// The factor of `v - out` of a key whose logit is `x log(2)` above the LSE, by two special-function instructions; NaN
/// stays NaN.
#[cube]
pub(crate) fn weight_of_power(change: &Change, x: f32) -> f32 {
    #[comptime]
    match change {
        // p / (all - p), and p = 2^x.
        ComptimeOption::Some(left_out) => reciprocal(fma(left_out.all, ex2(-x), -1.0f32)),
        ComptimeOption::None => sigmoid_of_power(x),
    }
}

/// The key's part of the LSE, if its logit is `x` above it and its factor is `weight`.
#[cube]
pub(crate) fn part_of_lse(change: &Change, x: f32, weight: f32) -> f32 {
    #[comptime]
    match change {
        ComptimeOption::Some(_) => weight.log1p(),
        ComptimeOption::None => softplus(x),
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
