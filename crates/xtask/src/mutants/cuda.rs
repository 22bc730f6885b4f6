//! The mutants of the tensor-core kernels, for a machine with a GPU and without Rust.

use super::copy::dir;
use super::run::executable;
use super::table::Mutant;
use crate::process::{Result, cargo, read, root, run, target_dir, write_file};
use std::path::PathBuf;
use std::process::Command;

/// The package of the contract tests, below the root.
const PACKAGE: &str = "tests";

/// The features of `gpu-pack --only tests`, so that little is rebuilt.
const FEATURES: &str = "flash-dma-tests/cuda,flash-dma-tests/fusion,flash-dma-tests/persistence";

/// Builds the contract tests of the copy for CUDA and lays them out with a list of mutants and the script that runs it.
///
/// # Errors
/// When something does not build or cannot be written.
pub(super) fn pack(mutants: &[&Mutant]) -> Result {
    let tests = build()?;
    let out = root().join("gpu-pack").join("mutants");
    let mut list = String::new();
    for mutant in mutants {
        for (program, filters) in &mutant.kill {
            if program != "tests" {
                let name = &mutant.name;
                return Err(format!(
                    "mutant `{name}` needs `{program}`, which is not packed"
                ));
            }
            list += &format!("{}\t{}\n", mutant.name, filters.join(" "));
        }
    }
    write_file(&out.join("mutants.tsv"), list)?;
    let script = out.join("run-mutants.sh");
    write_file(&script, include_str!("run-mutants.sh"))?;
    run(Command::new("chmod").arg("+x").arg(&script))?;
    let to = out.join("tests");
    std::fs::copy(&tests, &to).map_err(|e| format!("cannot write {}: {e}", to.display()))?;
    println!("mutants: {} mutants in {}", mutants.len(), out.display());
    println!("mutants: copy it into the unpacked archive of `cargo xtask gpu-pack`, then there:");
    println!("mutants: mutants/run-mutants.sh");
    Ok(())
}

fn build() -> Result<PathBuf> {
    let mut build = cargo(["build", "--profile", "gpu", "--package", "flash-dma-tests"]);
    build.args(["--test", "main", "--no-default-features"]);
    build.args(["--features", FEATURES]);
    build.args(["--message-format", "json-render-diagnostics"]);
    build.env("CARGO_TARGET_DIR", target_dir());
    let messages = read(build.current_dir(dir()))?;
    let tests = dir().join(PACKAGE);
    let mut found = messages
        .lines()
        .filter_map(|m| executable(m, &tests, false));
    found.next().ok_or("cargo built no tests".into())
}
