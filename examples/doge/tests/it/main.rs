//! The program `doge`: writing, training and serving.
#![cfg(feature = "flex")]

mod common;
mod fine_tune;
mod serve;
#[path = "../../../testing.rs"]
mod testing;
mod write;
