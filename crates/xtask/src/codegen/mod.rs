//! `cargo xtask codegen`: compiles kernel variants with the CUDA compiler, without a GPU, and checks the result.
//!
//! The kernels crate's `codegen` program writes each variant as CUDA C++; `gate.py` compiles the variants that
//! `docs/codegen.tsv` does not have, and compares.

use crate::process::{Result, linting, remove_dir, root, run as run_command, target_dir};
use crate::setup;
use crate::tools::Wheels;
use std::process::Command;

/// NVIDIA's compilers, of one toolkit release, 12.9: NVRTC and its headers, and ptxas.
const COMPILERS: Wheels = Wheels {
    folder: "cuda-venv",
    what: "NVIDIA's compilers (some 130 MB)",
    packages: &[
        "nvidia-cuda-nvrtc-cu12==12.9.86",
        "nvidia-cuda-runtime-cu12==12.9.79",
        "nvidia-cuda-cccl-cu12==12.9.27",
        "nvidia-cuda-nvcc-cu12==12.9.86",
    ],
};

const GATE: &str = "crates/xtask/src/codegen";

/// An integration test that builds within a second: one of the reference's.
const SMALL_TEST: &str = "oracle";

/// Runs the command: `--full` compiles also the variants in the table, `--bless` rewrites it, `--sources` compiles
/// nothing and prints a hash of each variant's source. Other arguments are prefixes of the names of the variants to
/// process. A variant that does not compile, breaks a rule, or needs more than the committed table allows is an
/// error.
pub fn run(options: &[String]) -> Result {
    let (switches, prefixes): (Vec<_>, Vec<_>) = options.iter().partition(|o| o.starts_with('-'));
    match switches[..] {
        [] => {}
        [one] if ["--full", "--bless", "--sources"].contains(&one.as_str()) => {}
        _ => return Err(format!("not options, or not together: {switches:?}")),
    }
    setup::all()?;

    let out = target_dir().join("codegen");
    remove_dir(&out)?;
    // Selects the whole workspace and a small test, so that features, also of development dependencies, are the same
    // as for the tests. Otherwise all of CubeCL would be compiled a second time.
    let small = ["--bin", "codegen", "--test", SMALL_TEST];
    run_command(linting(["build", "--workspace"]).args(small))?;
    let mut generator = Command::new(target_dir().join("debug/codegen"));
    run_command(generator.arg(&out).args(&prefixes).current_dir(root()))?;
    let mut gate = COMPILERS.command("python")?;
    gate.arg(root().join(GATE).join("gate.py")).args(switches);
    run_command(gate.arg(out).arg(root().join("docs")).args(prefixes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_mode_at_a_time() {
        let refused = |options: &[&str]| {
            let options: Vec<String> = options.iter().map(|&o| o.into()).collect();
            run(&options).unwrap_err()
        };
        assert!(refused(&["--blessed"]).starts_with("not options"));
        assert!(refused(&["--bless", "a", "--full"]).starts_with("not options"));
    }

    #[test]
    fn the_gate_passes_its_own_tests() {
        let mut python = Command::new("python3");
        python.args(["-B", "-m", "unittest", "-q"]);
        run_command(python.current_dir(root().join(GATE))).unwrap();
    }
}
