//! From rows to tables and plots: what `cargo xtask bench-report` writes into the book and the README.
//!
//! The book gets every row, the README a few; cases that lose against a peer are rows like the others. A test compares
//! the documents with what the records give.

mod cases;
mod chart;
mod commands;
mod compiled;
mod files;
mod first_call;
mod highlights;
mod join;
mod language;
mod learning;
mod learning_plots;
mod markdown;
mod options;
mod others;
mod pages;
mod plots;
mod products;
mod ran;
mod step_sentences;
mod step_tables;
mod steps;
mod suites;
mod tables;
mod tutorial;

pub use pages::{Output, Places};
