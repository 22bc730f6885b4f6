//! The programs of the book at a size for tests, and what they are made of.

mod learning;
mod programs;
mod selectors;
#[path = "../../../testing.rs"]
mod testing;
