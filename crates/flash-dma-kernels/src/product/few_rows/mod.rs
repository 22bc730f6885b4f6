//! Products of a few rows, such as those of a decoded token.
//!
//! A product of one row reads its right operand once and computes little, so it is bound by memory; in tiles of 128
//! rows it would wait for a few cubes that compute mostly unused rows. Here every unit loads whole vectors of B at
//! once.

mod blueprint;
mod kernel;
mod launch;
#[cfg(test)]
mod tests;

pub(crate) use launch::Plan;
