//! `cargo xtask fuzz`: random problems on one engine, with every output compared with the oracle.

use crate::process::{Result, cargo, run as run_command, target_dir};
use crate::setup;
use std::process::Command;

/// How the fuzzer is built for an engine: cargo's arguments, and the output folder.
struct Build {
    args: &'static [&'static str],
    folder: &'static str,
    llvm: bool,
}

/// The CPU engine alone, without Burn and CubeCL: seconds.
const ALONE: Build = Build {
    args: &[
        "--profile",
        "gpu",
        "--package",
        "flash-dma-tests",
        "--no-default-features",
        "--features",
        "programs",
    ],
    folder: "gpu",
    llvm: false,
};

/// The build of the tests, so that nothing else is built.
const DEFAULT: Build = Build {
    args: &["--workspace", "--features", "flash-dma-tests/programs"],
    folder: "debug",
    llvm: true,
};

const CUDA: Build = Build {
    args: &[
        "--profile",
        "gpu",
        "--package",
        "flash-dma-tests",
        "--no-default-features",
        "--features",
        "programs,cuda,fusion,persistence",
    ],
    folder: "gpu",
    llvm: true,
};

const WGPU: Build = Build {
    args: &[
        "--profile",
        "gpu",
        "--package",
        "flash-dma-tests",
        "--no-default-features",
        "--features",
        "programs,wgpu",
    ],
    folder: "gpu",
    llvm: true,
};

/// Builds the fuzzer with the requested engine, and passes the options on.
///
/// # Errors
/// When it does not build, or finds something.
pub fn run(options: &[String]) -> Result {
    let build = build(options);
    if build.llvm {
        setup::run(setup::Needs::BUILD)?;
    }
    run_command(cargo(["build", "--bin", "fuzz"]).args(build.args))?;
    run_command(Command::new(target_dir().join(build.folder).join("fuzz")).args(options))
}

fn build(options: &[String]) -> Build {
    let mut pairs = options.windows(2).filter(|pair| pair[0] == "--engine");
    match pairs.next_back().map_or("cpu", |pair| &pair[1]) {
        "kernels-cpu" | "burn-flex" => DEFAULT,
        "wgpu" => WGPU,
        name if name.contains("cuda") => CUDA,
        // The fuzzer itself refuses an unknown name.
        _ => ALONE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_built_with_what_it_needs() {
        let folder = |options: &[&str]| {
            let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
            let build = build(&options);
            (build.folder, build.llvm)
        };
        assert_eq!(folder(&[]), ("gpu", false));
        assert_eq!(folder(&["--engine", "cpu"]), ("gpu", false));
        assert_eq!(
            folder(&["--seed", "1", "--engine", "kernels-cpu"]),
            ("debug", true)
        );
        assert_eq!(
            folder(&["--engine", "cuda-mma", "--minutes", "3"]),
            ("gpu", true)
        );
        assert_eq!(folder(&["--engine", "wgpu"]), ("gpu", true));
    }
}
