//! `cargo xtask bench-report`: tables and plots of `bench-results/` for the book and the README.

use crate::process::{Result, cargo, run as run_command};

/// Runs the benches crate's program for this; the options are that program's.
///
/// # Errors
/// When a file is missing or contains no rows of measurements.
pub fn run(options: &[String]) -> Result {
    // Without features, so that neither Burn nor CubeCL is built.
    let mut report = cargo([
        "run",
        "--quiet",
        "--package",
        "flash-dma-benches",
        "--no-default-features",
        "--bin",
        "bench-report",
        "--",
    ]);
    run_command(report.args(options))
}
