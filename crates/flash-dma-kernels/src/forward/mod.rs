//! The forward pass.

mod kernel;
mod launch;
mod merge;
pub(crate) mod mma;
#[cfg(test)]
mod tests;

pub use launch::{
    ENGINE_VARIABLE, Engine, Tuning, forward, forward_engine, forward_on, forward_tuned,
    forward_workspace, forward_workspace_on,
};
