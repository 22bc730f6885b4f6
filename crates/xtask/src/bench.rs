//! `cargo xtask bench`: benchmarks, on this machine or in comparison with an earlier run on it.

use crate::process::{Result, cargo, run as run_command};
use crate::setup;

/// Builds the benchmarks with the runtime they ask for, and passes the options on.
pub fn run(options: &[String]) -> Result {
    setup::build()?;
    let features = features(options);
    run_command(
        cargo(["run", "--release", "--package", "flash-dma-benches"])
            .args(["--no-default-features", "--features", features])
            .args(["--bin", "bench", "--"])
            .args(options),
    )
}

/// Features of the benchmarks for the requested runtime or device. The commands that go through Burn take a GPU of NVIDIA if
/// none is requested.
fn features(options: &[String]) -> &'static str {
    let mut pairs = options.windows(2);
    let named = pairs.find(|pair| pair[0] == "--runtime" || pair[0] == "--device");
    let through_burn =
        |command: &String| ["selections", "step", "generation"].contains(&&**command);
    match named.map(|pair| pair[1].as_str()) {
        Some("cuda") => "extension,fusion,persistence",
        Some("wgpu") => "wgpu",
        None if options.first().is_some_and(through_burn) => "extension,fusion,persistence",
        _ => "flex,cpu,step",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_is_built_with_what_it_needs() {
        let cuda = "extension,fusion,persistence";
        for (options, expected) in [
            ("--help", "flex,cpu,step"),
            ("cpu --lengths 512", "flex,cpu,step"),
            ("attention --runtime cuda --baseline rows.json", cuda),
            ("step --seq 8192", cuda),
            ("step --seq 8192 --device flex", "flex,cpu,step"),
            ("masks --runtime wgpu", "wgpu"),
        ] {
            let words: Vec<String> = options.split(' ').map(str::to_owned).collect();
            assert_eq!(features(&words), expected, "{options}");
        }
    }
}
