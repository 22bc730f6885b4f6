//! `cargo xtask codegen`: what the CUDA compiler makes of every kernel variant, without a GPU.
//!
//! The kernels crate's `codegen` program writes each variant as CUDA C++; NVRTC and ptxas compile it as
//! CubeCL and the driver would. Registers, spills, stack and shared memory are held in `docs/codegen.tsv`,
//! and growth beyond [`table::Bounds`] fails. The sources are never compared: CubeCL numbers a
//! kernel's values differently from run to run.

mod table;
mod wheels;

use crate::process::{
    Result, cargo, read, read_file, root, run as run_command, switch, target_dir, write_file,
};
use crate::setup;
use std::path::Path;
use std::process::Command;
use table::{Manifest, Table};

/// The architectures of the gate: the oldest with `mma` and `cp.async`, and Hopper's own.
const ARCHES: [&str; 2] = ["sm_80", HOPPER];

/// The one architecture that has `wgmma`, and the device that the variants are chosen for.
const HOPPER: &str = "sm_90a";

/// Compiles CUDA C++ by NVRTC through ctypes.
const DRIVER: &str = include_str!("nvrtc.py");

/// Runs the command; `--bless` rewrites the committed table.
///
/// # Errors
/// When a variant does not compile, or needs more than the committed table allows.
pub fn run(options: &[String]) -> Result {
    let bless = switch(options, "--bless")?;
    setup::run(setup::Needs::ALL)?;

    let out = target_dir().join("codegen");
    generate(&out)?;
    let python = wheels::provide(&target_dir())?;
    let manifest = Manifest::parse(&read_file(&out.join("manifest.tsv"))?)?;
    let table = compile(&python, &out, &manifest)?;
    print!("{}", table.pretty());

    let committed = root().join("docs/codegen.tsv");
    if bless {
        write_file(&committed, table.to_string())?;
        println!("codegen: wrote {}", committed.display());
        return Ok(());
    }
    let expected = match committed.exists() {
        true => Table::parse(&read_file(&committed)?)?,
        false => return Err("docs/codegen.tsv does not exist; --bless writes it".into()),
    };
    let faults = table.faults(&expected);
    if faults.is_empty() {
        println!(
            "codegen: {} compiled kernels within the bounds of docs/codegen.tsv",
            table.rows.len()
        );
        return Ok(());
    }
    Err(format!(
        "generated code is not what docs/codegen.tsv allows:\n  {}\nIf it is what you meant, run \
         `cargo xtask codegen --bless` and commit the table with the change.",
        faults.join("\n  ")
    ))
}

/// Has the kernels crate write its variants to a fresh directory.
fn generate(out: &Path) -> Result {
    if out.exists() {
        std::fs::remove_dir_all(out).map_err(|e| format!("cannot clear {}: {e}", out.display()))?;
    }
    // The whole workspace is selected, so that features, and with them dependencies, are those of the tests.
    run_command(&mut cargo(["build", "--workspace", "--bin", "codegen"]))?;
    let mut generator = Command::new(target_dir().join("debug/codegen"));
    run_command(generator.arg(out).current_dir(root()))
}

fn compile(python: &Path, out: &Path, manifest: &Manifest) -> Result<Table> {
    let script = out.join("nvrtc.py");
    write_file(&script, DRIVER)?;
    let jobs: Vec<String> = manifest
        .variants
        .iter()
        .flat_map(|variant| ARCHES.map(|arch| (variant, arch)))
        .filter(|(variant, arch)| *arch == HOPPER || variant.launches_before_hopper())
        .map(|(variant, arch)| format!("{}:{arch}", variant.name))
        .collect();
    println!(
        "codegen: {} variants for {}",
        manifest.variants.len(),
        ARCHES.join(", ")
    );
    let rows = read(Command::new(python).arg(&script).arg(out).args(jobs))?;
    Table::compiled(&rows, manifest)
}
