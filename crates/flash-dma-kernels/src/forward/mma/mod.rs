//! The forward pass on tensor cores.

mod blueprint;
mod kernel;
mod launch;
mod logits;
mod repair;
mod rows;
mod stream;
mod wgmma;

pub(crate) use blueprint::MmaBlueprint;
pub(crate) use launch::launch;
