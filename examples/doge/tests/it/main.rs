//! The program `doge`: what it writes, trains and serves.
#![cfg(feature = "flex")]

mod common;
mod fine_tune;
mod serve;
#[path = "../../../testing.rs"]
mod testing;
mod write;
