//! The contract, tested on every engine of the build: see the crate's documentation.

mod contract;
mod decode;
mod faults;
mod fuzz;
mod gradients;
mod masked;
mod memory;
mod norm;
mod products;
mod properties;
mod refused;
mod regression;
#[cfg(feature = "burn")]
mod training;
