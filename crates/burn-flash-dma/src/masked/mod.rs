//! Attention under an arbitrary mask and bias: the second operation beside dynamic-mask attention.

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(any(feature = "cube", feature = "flex"))]
mod bias;
mod builders;
#[cfg(feature = "cube")]
mod cube;
pub mod fallback;
#[cfg(feature = "flex")]
mod flex;
mod functions;
#[cfg_attr(
    not(any(feature = "cube", feature = "flex", feature = "ndarray")),
    allow(unused_variables)
)]
pub mod ops;
mod plan;
mod ranges;

pub use builders::BlockRule;
pub use functions::{
    masked_attention, masked_attention_with_lse, masked_attention_with_plan, try_masked_attention,
    try_masked_attention_with_lse, try_masked_attention_with_plan,
};
pub use plan::{AttentionMask, TilePlan};
pub use ranges::KeyRanges;

/// No engine of its own: the default bodies.
#[cfg(feature = "ndarray")]
impl ops::MaskedAttentionOps for burn::backend::NdArray {}
