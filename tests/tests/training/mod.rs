//! The parts of a training step other than attention and products, through Burn.

mod step;
mod update;
