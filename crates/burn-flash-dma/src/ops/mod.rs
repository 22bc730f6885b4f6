//! The operations as a backend extension: traits that an engine implements, below the `Tensor` API.
//!
//! | trait | operations |
//! |---|---|
//! | [`DynamicMaskOps`] | selection, forward and backward of dynamic-mask attention |
//! | [`MaskedAttentionOps`] | tile plans, forward and backward of attention under a mask and a bias |
//! | [`CacheOps`] | appending to a cache, and attention over it |
//! | [`NormOps`] | RMS norm, and norm and rotary encoding of heads |
//! | [`PackedOps`] | q, k and v as parts of one tensor |
//! | [`ProductOps`] | products of linear layers and of their gradients |
//! | [`ScoreOps`] | scores of a few tokens |
//! | [`TrainingOps`] | other operations of a training step |
//!
//! Under fusion the shapes of results come from the attributes, and are never compared with those the engine returns.

pub(crate) mod attention;
pub(crate) mod cache;
pub(crate) mod masked;
pub(crate) mod norm;
pub(crate) mod packed;
pub(crate) mod product;
pub(crate) mod scores;
pub(crate) mod training;

pub use crate::types::*;
pub use attention::DynamicMaskOps;
pub use cache::CacheOps;
pub use masked::MaskedAttentionOps;
pub use norm::NormOps;
pub use packed::PackedOps;
pub use product::ProductOps;
pub use scores::ScoreOps;
pub use training::TrainingOps;
