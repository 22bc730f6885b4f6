//! The backward pass: row sums, then dq (query-outer) and dk, dv, dscores (key-outer), each recomputing
//! the probabilities from the LSE. The portable kernels are here; those for tensor cores in [`mma`].

mod delta;
mod dkdv;
mod dq;
mod launch;
pub(crate) mod mma;
mod order;
#[cfg(test)]
mod tests;
mod wgmma;
mod workspace;

pub(crate) use launch::{Blueprints, launch_delta};
pub use launch::{backward, backward_engine, backward_on};
pub use workspace::{backward_workspace, backward_workspace_on};
