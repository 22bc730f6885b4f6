//! The gradients of biases that need their own kernels: with a query axis, on `wgmma`; shared by all keys, on every
//! engine ([`rows`]).

pub(crate) mod blueprint;
pub(crate) mod kernel;
pub(crate) mod launch;
pub(crate) mod rows;
pub(crate) mod steps;
pub(crate) mod tiles;
