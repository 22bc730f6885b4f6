//! Host code shared by every operation: engines, plans, checks of tensors, scratch buffers, late errors.

pub(crate) mod check;
pub(crate) mod cpu;
pub(crate) mod engine;
pub(crate) mod faults;
pub(crate) mod fill;
pub(crate) mod flat;
pub(crate) mod pass;
#[cfg(feature = "internals")]
pub(crate) mod peak;
pub(crate) mod portable_warning;
pub(crate) mod range;
pub(crate) mod scratch;
