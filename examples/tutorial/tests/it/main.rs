//! The programs of the book at a size for tests, and their parts.

mod learning;
mod programs;
mod selectors;
#[path = "../../../testing.rs"]
mod testing;
