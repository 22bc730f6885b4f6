//! The host side that every operation shares: checks of tensors, scratch buffers, and errors that a device reports
//! late.

pub(crate) mod check;
pub(crate) mod cpu;
pub(crate) mod engine;
pub(crate) mod faults;
pub(crate) mod fill;
pub(crate) mod peak;
pub(crate) mod scratch;
