//! The backward pass: row sums, then dq (query-outer) and dk, dv, dscores (key-outer), each recomputing
//! the probabilities from the LSE. No atomics: every gradient is summed by one unit in a fixed order.

mod delta;
mod dkdv;
mod dq;
mod launch;
mod order;
#[cfg(test)]
mod tests;

pub use launch::backward;
