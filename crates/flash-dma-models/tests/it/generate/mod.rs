//! Generation with decoders small enough that the correct text is known.
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
