//! The host side that every operation shares: engines and plans, checks of tensors, scratch buffers, and errors that a
//! device reports late.

pub(crate) mod check;
pub(crate) mod cpu;
pub(crate) mod engine;
pub(crate) mod faults;
pub(crate) mod fill;
pub(crate) mod pass;
#[cfg(feature = "internals")]
pub(crate) mod peak;
pub(crate) mod portable_warning;
pub(crate) mod range;
pub(crate) mod scratch;
