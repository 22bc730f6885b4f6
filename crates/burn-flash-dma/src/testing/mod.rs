//! Checks for the tests of a model built on this crate; behind the feature `testing`, which belongs in
//! `[dev-dependencies]`.
//!
//! - [`assert_causal`]: no output of a model depends on later tokens;
//! - [`check_gradients`]: outputs and gradients agree with f64 on the caller's shapes and device.

mod causal;
mod gradients;

pub use causal::{
    CausalError, CausalInput, CausalReport, Change, Leak, assert_causal, try_assert_causal,
};
pub use gradients::{
    Checked, GradientCheck, GradientError, GradientReport, Sample, check_gradients,
    try_check_gradients,
};
