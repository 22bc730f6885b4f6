//! The extension's engines.

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;

/// No engine of its own: the default bodies.
#[cfg(feature = "ndarray")]
impl crate::ops::DynamicMaskOps for burn::backend::NdArray {}
