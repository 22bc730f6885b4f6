//! The parts of the example program `train-text`: text ([`data`]) for a byte-level transformer, its training by
//! burn-train ([`mod@train`]), and what goes on with a text from a trained model ([`generate`]). The example `endless`
//! uses them, too.

pub mod checkpoints;
pub mod cli;
pub mod curves;
pub mod data;
pub mod device;
pub mod error;
mod font;
pub mod generate;
pub mod loader;
pub mod plot;
mod progress;
pub mod report;
pub mod rng;
pub mod sample;
pub mod train;
