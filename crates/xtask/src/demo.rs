//! `cargo xtask demo`: the main example at a size that a laptop's CPU finishes within minutes.

use crate::process::{Result, cargo, run as run_command};
use std::time::Instant;

/// Builds and runs `examples/train-text` with its demo setting; further options are passed on.
///
/// # Errors
/// When the example cannot be built or fails.
pub fn run(options: &[String]) -> Result {
    println!(
        "demo: training a byte-level transformer with dynamic-mask attention on this repository's own text,\n\
         on the CPU through Burn's Flex backend. The first build takes some minutes, the training under three.\n\
         Checkpoints, loss curves and the sampled text go to runs/demo/.\n"
    );
    let start = Instant::now();
    // Only the package's own features: a workspace-wide build would want LLVM.
    run_command(&mut cargo([
        "build",
        "--release",
        "--package",
        "train-text",
    ]))?;
    println!("demo: built in {:.0} s", start.elapsed().as_secs_f64());

    let start = Instant::now();
    let mut train = cargo([
        "run",
        "--quiet",
        "--release",
        "--package",
        "train-text",
        "--",
        "--demo",
    ]);
    run_command(train.args(options))?;
    println!(
        "\ndemo: trained in {:.0} s; see runs/demo/",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}
