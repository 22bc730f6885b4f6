//! Engines of the extension: for each backend the traits of [`ops`](crate::ops), one file each.

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(any(feature = "cube", feature = "flex"))]
mod bias;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
