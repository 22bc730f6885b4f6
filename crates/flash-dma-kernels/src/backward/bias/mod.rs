//! Gradients of biases with kernels of their own: with a query axis on `wgmma`; shared by all keys on all engines
//! ([`rows`]).

pub(crate) mod blueprint;
pub(crate) mod kernel;
pub(crate) mod launch;
pub(crate) mod rows;
pub(crate) mod steps;
pub(crate) mod tiles;
