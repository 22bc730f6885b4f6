//! `cargo xtask fuzz`: random problems on one engine, with every output compared with the oracle.

use crate::process::{Result, cargo, run as run_command, target_dir};
use crate::setup;
use std::process::Command;

/// Builds the fuzzer with the requested engine, and passes the options on.
pub fn run(options: &[String]) -> Result {
    let features = features(options);
    if features != Some("") {
        setup::build()?;
    }
    let mut build = cargo(["build", "--bin", "fuzz"]);
    let folder = match features {
        None => {
            build.args(["--workspace", "--features", "flash-dma-tests/programs"]);
            "debug"
        }
        Some(features) => {
            build.args(["--profile", "gpu", "--package", "flash-dma-tests"]);
            build.args(["--no-default-features", "--features", "programs"]);
            build.args(["--features", features]);
            "gpu"
        }
    };
    run_command(&mut build)?;
    run_command(Command::new(target_dir().join(folder).join("fuzz")).args(options))
}

/// Features of the tests that the requested engine needs: none for the CPU engine, which builds within seconds.
/// `None` for the build of the tests themselves, so that nothing else is built.
fn features(options: &[String]) -> Option<&'static str> {
    let mut pairs = options.windows(2).filter(|pair| pair[0] == "--engine");
    match pairs.next_back().map_or("cpu", |pair| &pair[1]) {
        "kernels-cpu" | "burn-flex" => None,
        "wgpu" => Some("wgpu"),
        "vulkan" => Some("vulkan"),
        name if name.contains("cuda") => Some("cuda,fusion,persistence"),
        // The fuzzer itself refuses an unknown name.
        _ => Some(""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_built_with_what_it_needs() {
        let cuda = "cuda,fusion,persistence";
        for (options, expected) in [
            ("", Some("")),
            ("--engine cpu", Some("")),
            ("--seed 1 --engine kernels-cpu", None),
            ("--engine cuda-mma --minutes 3", Some(cuda)),
            ("--engine wgpu", Some("wgpu")),
            ("--engine vulkan", Some("vulkan")),
        ] {
            let words: Vec<String> = options.split(' ').map(str::to_owned).collect();
            assert_eq!(features(&words), expected, "{options}");
        }
    }
}
