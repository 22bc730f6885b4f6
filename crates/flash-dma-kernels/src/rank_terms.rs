//! The terms by which the ranks of keys learn: runners-up that are added to a query's keys, or kept keys that are left
//! out.

use crate::pattern::intervals::ranked::RankedSource;
use cubecl::prelude::*;
use flash_dma_problem::OWN_OUTPUT_WEIGHT;

/// The inputs of a rank kernel in addition to the products of its pairs.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RankTerms {
    /// Contiguous `[batch, q_heads, q_len]`: LSE gradients, which the deltas have been reduced by; absent if zero.
    pub grad_lse: ComptimeOption<Box<[f32]>>,
    pub change: Change,
    /// True if the launch adds to what an earlier one has written.
    #[cube(comptime)]
    pub adds: bool,
}

/// The launch argument of the gradients of the LSEs and of the change for the keys of `source`, for a launch that adds to
/// what an earlier one has written, or that overwrites.
pub(crate) fn rank_terms(
    grad_lse: Option<&TensorBinding>,
    source: RankedSource,
    adds: bool,
) -> RankTermsLaunch {
    let grad_lse = grad_lse.map(|grad| grad.clone().into_buffer_arg());
    let change = match source {
        RankedSource::RunnersUp(_) => ChangeLaunch::new(1.0, ChangeKind::Added),
        RankedSource::Kept(_) => ChangeLaunch::new(1.0 + OWN_OUTPUT_WEIGHT, ChangeKind::LeftOut),
    };
    RankTermsLaunch::new(grad_lse.into(), change, adds)
}

/// The kinds of change of a query's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ChangeKind {
    Added,
    /// A kept key is left out.
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
