//! `cargo xtask codegen`: compiles every kernel variant with the CUDA compiler, without a GPU, and checks the result.
//!
//! The kernels crate's `codegen` program writes each variant as CUDA C++; NVRTC and ptxas compile it as
//! CubeCL and the driver would, for the devices that launch it. Registers, stack, shared memory and the number of
//! tensor-core instructions are held in `docs/codegen.tsv`, and growth beyond [`table::Bounds`] or a lost instruction
//! fails. Spills fail unless `docs/codegen-spills.tsv` says why they are accepted. The sources are never
//! compared: CubeCL numbers a kernel's values differently from run to run.

mod spills;
mod table;
mod wheels;

use crate::process::{
    Result, cargo, read, read_file, root, run as run_command, switch, target_dir, write_file,
};
use crate::setup;
use spills::Spills;
use std::path::Path;
use std::process::Command;
use table::{Manifest, Table};

/// Compiles CUDA C++ by NVRTC through ctypes.
const DRIVER: &str = include_str!("nvrtc.py");

/// Runs the command; `--bless` rewrites the committed table. `--sources` compiles nothing and prints a hash of each
/// variant's source, to show that a change of the kernels' Rust leaves their CUDA as it is. Other arguments are
/// prefixes of the names of the variants to process.
///
/// # Errors
/// When a variant does not compile, breaks a rule, or needs more than the committed table allows.
pub fn run(options: &[String]) -> Result {
    let (switches, prefixes): (Vec<_>, Vec<_>) =
        options.iter().cloned().partition(|o| o.starts_with("--"));
    let sources = switches == ["--sources"];
    let bless = !sources && switch(&switches, "--bless")?;
    setup::run(setup::Needs::ALL)?;

    let out = target_dir().join("codegen");
    generate(&out, &prefixes)?;
    let python = wheels::provide(&target_dir())?;
    let manifest = Manifest::parse(&read_file(&out.join("manifest.tsv"))?)?;
    let script = out.join("nvrtc.py");
    write_file(&script, DRIVER)?;
    if sources {
        let names = manifest.variants.iter().map(|variant| &variant.name);
        let mut driver = Command::new(python);
        return run_command(driver.arg(&script).arg("--sources").arg(&out).args(names));
    }
    let table = compile(&python, &script, &out, &manifest)?;
    print!("{}", table.pretty());

    let spills = Spills::parse(&read_file(&root().join("docs/codegen-spills.tsv"))?)?;
    let mut faults = table.violations(&spills);
    if prefixes.is_empty() {
        faults.extend(spills.unused(&table));
    }
    let about =
        |name: &str| prefixes.is_empty() || prefixes.iter().any(|prefix| name.starts_with(prefix));
    let committed = root().join("docs/codegen.tsv");
    let compiled = table.rows.len();
    if bless {
        let mut blessed = table;
        if !prefixes.is_empty() {
            let others = Table::parse(&read_file(&committed)?)?.rows.into_iter();
            blessed
                .rows
                .extend(others.filter(|((name, _), _)| !about(name)));
        }
        write_file(&committed, blessed.to_string())?;
        println!("codegen: wrote {}", committed.display());
    } else {
        let mut expected = Table::parse(&read_file(&committed)?)?;
        expected.rows.retain(|(name, _), _| about(name));
        faults.extend(table.growth(&expected));
    }
    if faults.is_empty() {
        println!("codegen: {compiled} compiled kernels within the bounds of docs/codegen.tsv");
        return Ok(());
    }
    Err(format!(
        "generated code is not what docs/codegen.tsv and docs/codegen-spills.tsv allow:\n  {}\nIf it is what you \
         meant, run `cargo xtask codegen --bless` and commit the table with the change. Spills need a row \
         with a reason in docs/codegen-spills.tsv.",
        faults.join("\n  ")
    ))
}

/// Makes the kernels crate write its variants to a fresh directory.
fn generate(out: &Path, prefixes: &[String]) -> Result {
    if out.exists() {
        std::fs::remove_dir_all(out).map_err(|e| format!("cannot clear {}: {e}", out.display()))?;
    }
    // The whole workspace is selected, so that features, and thus dependencies, are the same as for the tests.
    run_command(&mut cargo(["build", "--workspace", "--bin", "codegen"]))?;
    let mut generator = Command::new(target_dir().join("debug/codegen"));
    run_command(generator.arg(out).args(prefixes).current_dir(root()))
}

fn compile(python: &Path, script: &Path, out: &Path, manifest: &Manifest) -> Result<Table> {
    let jobs: Vec<String> = manifest
        .variants
        .iter()
        .flat_map(|variant| variant.arches.iter().map(move |arch| (variant, arch)))
        .map(|(variant, arch)| format!("{}:{arch}", variant.name))
        .collect();
    println!(
        "codegen: {} variants, {} with their architectures",
        manifest.variants.len(),
        jobs.len()
    );
    let rows = read(Command::new(python).arg(script).arg(out).args(jobs))?;
    Table::compiled(&rows, manifest)
}
