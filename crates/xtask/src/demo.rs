//! `cargo xtask demo`: a model learns which keys to keep, on a CPU, within minutes.

use crate::process::{Result, cargo, run as run_command};
use std::time::Instant;

/// The tutorial's programs, in a profile that optimises only the code that determines the demo's time.
const PROGRAMS: [&str; 4] = ["--profile", "demo", "--package", "tutorial"];

/// Builds and runs the demo; options are passed on.
pub fn run(options: &[String]) -> Result {
    println!(
        "demo: on the CPU, through Burn's Flex backend. The first build takes a minute or two, the training one.\n\
         The pictures go to runs/demo/.\n"
    );
    let start = Instant::now();
    run_command(cargo(["build"]).args(PROGRAMS))?;
    println!("demo: built in {:.0} s\n", start.elapsed().as_secs_f64());

    let mut demo = cargo(["run", "--quiet"]);
    run_command(demo.args(PROGRAMS).args(["--", "demo"]).args(options))
}
