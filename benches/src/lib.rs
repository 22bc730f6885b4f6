//! Benchmarks of flash-dma: the workload table, how a sample becomes a figure, and the row format.
//! The programs are in `src/bin`.
#![warn(missing_docs)]

pub mod stats;
pub mod workloads;
