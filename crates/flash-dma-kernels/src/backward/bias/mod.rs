//! The gradient of a bias with a query axis, on `wgmma`.

pub(crate) mod blueprint;
pub(crate) mod kernel;
pub(crate) mod launch;
pub(crate) mod steps;
pub(crate) mod tiles;
