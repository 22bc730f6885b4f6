//! The host side of the backward pass on tensor cores.

pub(crate) mod launch;
pub(crate) mod masked;
pub(crate) mod pass;
pub(crate) mod workspace;
