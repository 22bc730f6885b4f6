//! The functions on `Tensor`: most of them builders.

pub(crate) mod attention;
pub(crate) mod composition;
pub(crate) mod gating;
pub(crate) mod inspection;
#[cfg(feature = "autodiff")]
pub(crate) mod live;
pub(crate) mod masked;
pub(crate) mod merge;
pub(crate) mod norm;
pub(crate) mod packed;
pub(crate) mod probabilities;
pub(crate) mod product;
pub(crate) mod qkv;
pub(crate) mod scores;
pub(crate) mod selection;
pub(crate) mod selector;
pub(crate) mod sink;
pub mod state;
