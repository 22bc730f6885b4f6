//! The forward pass on tensor cores.

mod blueprint;
mod kernel;
mod launch;
mod logits;
mod nonfinite;
mod rows;
mod stream;

pub(crate) use blueprint::MmaBlueprint;
pub(crate) use launch::launch;
