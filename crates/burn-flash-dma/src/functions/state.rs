//! The states of the builders, as types, so that combinations without a meaning do not compile.
//!
//! | builder | without | with |
//! |---|---|---|
//! | [`Attention`](crate::Attention) | [`AllKeys`]: dense, may be given scores | [`ScoredKeys`]: may be given intervals |
//! | [`MaskedAttention`](crate::MaskedAttention) | [`NoMask`]: may be given a mask or a plan | [`Masked`] |

/// No scores: every visible key is attended.
#[derive(Clone, Copy, Debug)]
pub struct AllKeys;

/// The keys have scores.
#[derive(Clone, Copy, Debug)]
pub struct ScoredKeys;

/// No mask: every key is shown, but for causal masking.
#[derive(Clone, Copy, Debug)]
pub struct NoMask;

/// A mask, or a plan of one.
#[derive(Clone, Copy, Debug)]
pub struct Masked;
