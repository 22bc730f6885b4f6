//! States of the builders, as types, so that meaningless combinations do not compile.
//!
//! | builder | without | with |
//! |---|---|---|
//! | [`Attention`](crate::Attention) | [`AllKeys`]: dense, accepts scores or intervals | [`ScoredKeys`]: accepts intervals; [`SelectedKeys`] |
//! | [`PackedAttention`](crate::PackedAttention) | [`AllKeys`]: accepts scores, or anything that makes it [`Masked`] | [`ScoredKeys`], [`Masked`] |
//! | [`MaskedAttention`](crate::MaskedAttention) | [`NoMask`]: accepts a mask or a plan | [`Masked`] |

/// No scores: every visible key is attended.
#[derive(Clone, Copy, Debug)]
pub struct AllKeys;

/// The keys have scores.
#[derive(Clone, Copy, Debug)]
pub struct ScoredKeys;

/// Intervals and no scores: the keys are selected, and nothing is added to their logits.
#[derive(Clone, Copy, Debug)]
pub struct SelectedKeys;

/// No mask: every key is visible, causal masking aside.
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
