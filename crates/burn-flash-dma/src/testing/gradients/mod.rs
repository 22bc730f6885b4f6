//! A check that outputs and gradients agree with f64 on the caller's own shapes, element type and device.

mod check;
mod compare;
mod data;
mod passes;
mod report;

pub use check::{GradientCheck, check_gradients, try_check_gradients};
pub use report::{Checked, GradientError, GradientReport, Sample};
