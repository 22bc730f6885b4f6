//! The extension's engines.

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "cube")]
mod cube_cache;
#[cfg(feature = "flex")]
pub(crate) mod flex;
#[cfg(feature = "flex")]
mod flex_cache;
#[cfg(feature = "autodiff")]
mod node;

#[cfg(feature = "autodiff")]
pub(crate) use autodiff::first_order;
#[cfg(feature = "autodiff")]
pub(crate) use node::{Pass, record};

/// No engine of its own: the default bodies.
#[cfg(feature = "ndarray")]
impl crate::ops::DynamicMaskOps for burn::backend::NdArray {}

#[cfg(feature = "ndarray")]
impl crate::cache::ops::CacheOps for burn::backend::NdArray {}
