//! The parts of a training step other than attention and products, through Burn.

pub mod in_parts;
mod step;
mod update;
