//! Benchmarks of flash-dma: the workload table, the calls that are timed, and how a sample becomes a row. The programs are
//! in `src/bin` and `benches`; `bench-results/report.py` makes tables and plots of the rows.
#![warn(missing_docs)]

#[cfg(feature = "cube")]
pub mod buffers;
#[cfg(feature = "cube")]
pub mod check;
#[cfg(feature = "cube")]
pub mod decoding;
#[cfg(feature = "cube")]
pub mod gradients;
pub mod kernel_kinds;
pub mod launches;
pub mod roof;
pub mod rows;
pub mod shares;
#[cfg(feature = "cube")]
pub mod spread;
pub mod stats;
pub mod versions;
pub mod workloads;
