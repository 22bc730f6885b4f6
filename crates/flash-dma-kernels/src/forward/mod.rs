//! The forward pass.

mod kernel;
mod launch;
#[cfg(test)]
mod tests;

pub use launch::forward;
