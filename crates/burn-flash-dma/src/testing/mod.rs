//! Checks for the tests of a model that is built on this crate; behind the feature `testing`, which belongs into
//! `[dev-dependencies]`.
//!
//! - [`check_gradients`]: outputs and gradients agree with f64 on the caller's shapes and device.

mod gradients;

pub use gradients::{
    Checked, GradientCheck, GradientError, GradientReport, Sample, check_gradients,
    try_check_gradients,
};
