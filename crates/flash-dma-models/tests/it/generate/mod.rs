//! Generation over decoders that are small enough to know what they must write.
#![cfg(feature = "flex")]

mod api_fuzz;
mod batches;
mod beams;
mod book;
mod chain;
mod decoder;
mod draws;
mod model;
mod refused;
mod sampler;
mod speculate;
