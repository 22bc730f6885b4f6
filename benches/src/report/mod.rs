//! From rows to tables and plots: what `cargo xtask bench-report` writes into the book and the README.
//!
//! The book gets every row, the README eight; cases that lose against a peer are rows like the others.

mod cases;
mod chart;
mod highlights;
mod join;
mod learning;
mod markdown;
mod others;
mod tables;

pub use chart::{Chart, Point, Series};
pub use highlights::highlights;
pub use join::{Peer, Peers, Report};
pub use learning::recall_tables;
pub use markdown::replace_section;
pub use others::Others;
