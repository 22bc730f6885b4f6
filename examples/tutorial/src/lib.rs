//! The code of the book's tutorial: a task, a model of one attention layer, its training, and pictures of what it
//! keeps. The programs `tutorial` and `demo` are built on it.
#![warn(missing_docs)]

pub mod model;
pub mod picture;
pub mod task;
pub mod training;
