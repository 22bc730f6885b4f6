//! The keys that each query attends to, as the lists and bits that kernels stream.
//!
//! [`intervals`] turns the interval of every key into lists; [`mask`] does so for an arbitrary mask.

pub(crate) mod intervals;
pub(crate) mod kind;
pub(crate) mod layout;
pub(crate) mod mask;
pub(crate) mod position;
pub(crate) mod tensors;
