//! The states of the builders, as types, so that combinations without a meaning do not compile.
//!
//! | builder | without | with |
//! |---|---|---|
//! | [`Attention`](crate::Attention) | [`AllKeys`]: dense, may be given scores or intervals | [`ScoredKeys`]: may be given intervals; [`SelectedKeys`] |
//! | [`PackedAttention`](crate::PackedAttention) | [`AllKeys`]: may be given scores, or what makes it [`Masked`] | [`ScoredKeys`], [`Masked`] |
//! | [`MaskedAttention`](crate::MaskedAttention) | [`NoMask`]: may be given a mask or a plan | [`Masked`] |

/// No scores: every visible key is attended.
#[derive(Clone, Copy, Debug)]
pub struct AllKeys;

/// The keys have scores.
#[derive(Clone, Copy, Debug)]
pub struct ScoredKeys;

/// Intervals and no scores: the keys are selected, and nothing is added to their logits.
#[derive(Clone, Copy, Debug)]
pub struct SelectedKeys;

/// No mask: every key is shown, but for causal masking.
#[derive(Clone, Copy, Debug)]
pub struct NoMask;

/// A mask, or a plan of one.
#[derive(Clone, Copy, Debug)]
pub struct Masked;

/// The states without scores.
pub trait Unscored: sealed::Sealed {}

impl Unscored for AllKeys {}
impl Unscored for Masked {}

mod sealed {
    pub trait Sealed {}

    impl Sealed for super::AllKeys {}
    impl Sealed for super::Masked {}
}
