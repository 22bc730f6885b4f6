//! Benchmarks of flash-dma: the workload table, the calls that are timed, how a sample becomes a row,
//! and how rows become tables and plots. The programs are in `src/bin` and `benches`.
#![warn(missing_docs)]

#[cfg(feature = "cube")]
pub mod buffers;
#[cfg(feature = "cube")]
pub mod check;
#[cfg(feature = "cube")]
pub mod decoding;
#[cfg(feature = "step")]
pub mod device;
#[cfg(feature = "cube")]
pub mod gradients;
pub mod kernel_kinds;
pub mod launches;
pub mod report;
pub mod roof;
pub mod rows;
pub mod shares;
#[cfg(feature = "cube")]
pub mod spread;
pub mod stats;
pub mod versions;
pub mod workloads;
