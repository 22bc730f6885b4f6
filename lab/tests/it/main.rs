//! The program as a user runs it, and the common parts of its arms.
#![cfg(feature = "flex")]

mod book;
mod cli;
mod learns;
mod models;
#[path = "../../../examples/testing.rs"]
mod testing;
