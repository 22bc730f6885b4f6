//! From rows to tables and plots: what `cargo xtask bench-report` writes into the README and the book.
//!
//! Nothing is left out on the way: cases that lose against a peer are rows like the others.

mod chart;
mod join;
mod markdown;

pub use chart::{Chart, Point, Series};
pub use join::{Peer, Peers, Report};
pub use markdown::replace_section;
