//! Text to batches: files, inputs, rows, loaders, and Burn's training loop.
#![cfg(all(feature = "data", feature = "flex"))]

mod file;
mod input;
mod loader;
mod packing;
mod speed;
mod support;
mod tokenizer;
#[cfg(feature = "train")]
mod training;
