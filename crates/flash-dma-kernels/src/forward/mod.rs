//! The forward pass.

mod kernel;
mod launch;
pub(crate) mod mma;
#[cfg(test)]
mod tests;

pub use launch::{Engine, forward, forward_engine, forward_on};
