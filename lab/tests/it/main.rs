//! The program as a person meets it, and what its arms share.
#![cfg(feature = "flex")]

mod book;
mod cli;
mod learns;
mod models;
#[path = "../../../examples/testing.rs"]
mod testing;
