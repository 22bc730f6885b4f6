//! The gradients of biases that need kernels of their own: on `wgmma`, one with a query axis; everywhere, one that all
//! keys share ([`rows`]).

pub(crate) mod blueprint;
pub(crate) mod kernel;
pub(crate) mod launch;
pub(crate) mod rows;
pub(crate) mod steps;
pub(crate) mod tiles;
