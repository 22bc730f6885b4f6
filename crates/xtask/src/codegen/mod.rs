//! `cargo xtask codegen`: compiles every kernel variant with the CUDA compiler, without a GPU, and checks the result.
//!
//! The kernels crate's `codegen` program writes each variant as CUDA C++; NVRTC and ptxas compile it as
//! CubeCL and the driver would, for the devices that launch it. Registers, stack, shared memory and the number of
//! tensor-core instructions are held in `docs/codegen.tsv`, and growth beyond [`table::Bounds`] or a lost instruction
//! fails. Spills fail unless `docs/codegen-spills.tsv` says why they are accepted. A kernel whose source and compilers are
//! those of its committed row is not compiled again, but for a sample; `--fresh` compiles all.

mod spills;
mod table;

use crate::process::{
    Result, cargo, read, read_file, root, run as run_command, target_dir, write_file,
};
use crate::setup;
use crate::wheels::Wheels;
use spills::Spills;
use std::path::Path;
use std::process::Command;
use table::{Manifest, Table};

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

/// Compiles CUDA C++ by NVRTC through ctypes.
const DRIVER: &str = include_str!("nvrtc.py");

/// The rows that need not be compiled again, below the directory of the sources.
const BELIEVED: &str = "believed.tsv";

/// What is done with the generated sources.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Compared with the committed table, which is believed of the sources that it knows, but for a sample.
    Check,
    /// As [`Mode::Check`], and nothing is believed.
    Fresh,
    /// Written to the committed table.
    Bless,
    /// Hashed, to show that a change of the kernels' Rust leaves their CUDA as it is.
    Sources,
}

impl Mode {
    fn of(switches: &[String]) -> Result<Self> {
        match switches {
            [] => Ok(Self::Check),
            [one] => match one.as_str() {
                "--fresh" => Ok(Self::Fresh),
                "--bless" => Ok(Self::Bless),
                "--sources" => Ok(Self::Sources),
                other => Err(format!("unknown option `{other}`")),
            },
            [one, other, ..] => Err(format!("`{one}` and `{other}` do not go together")),
        }
    }
}

/// Runs the command: `--bless` rewrites the committed table, `--fresh` compiles what the table knows as well, `--sources`
/// compiles nothing and prints a hash of each variant's source. Other arguments are prefixes of the names of the
/// variants to process.
///
/// # Errors
/// When a variant does not compile, breaks a rule, or needs more than the committed table allows.
pub fn run(options: &[String]) -> Result {
    let (switches, prefixes): (Vec<_>, Vec<_>) =
        options.iter().cloned().partition(|o| o.starts_with("--"));
    let mode = Mode::of(&switches)?;
    setup::run(setup::Needs::ALL)?;

    let out = target_dir().join("codegen");
    generate(&out, &prefixes)?;
    let python = COMPILERS.provide("python")?;
    let manifest = Manifest::parse(&read_file(&out.join("manifest.tsv"))?)?;
    let script = out.join("nvrtc.py");
    write_file(&script, DRIVER)?;
    if mode == Mode::Sources {
        let names = manifest.variants.iter().map(|variant| &variant.name);
        let mut driver = Command::new(python);
        return run_command(driver.arg(&script).arg("--sources").arg(&out).args(names));
    }
    let committed = root().join("docs/codegen.tsv");
    let mut expected = match (mode, Table::parse(&read_file(&committed)?)) {
        (Mode::Bless, Err(_)) if prefixes.is_empty() => Table::default(),
        (_, table) => table?,
    };
    let believed = out.join(BELIEVED);
    match mode {
        Mode::Fresh => {
            clear(&target_dir().join("codegen-cache"))?;
            write_file(&believed, "")?;
        }
        _ => write_file(&believed, expected.lines())?,
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
    let compiled = table.rows.len();
    if mode == Mode::Bless {
        expected.rows.retain(|(name, _), _| !about(name));
        expected.rows.extend(table.rows);
        write_file(&committed, expected.to_string())?;
        println!("codegen: wrote {}", committed.display());
    } else {
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

/// An integration test that builds within a second: one of the reference's.
const SMALL_TEST: &str = "sampled";

/// Makes the kernels crate write its variants to a fresh directory.
fn generate(out: &Path, prefixes: &[String]) -> Result {
    clear(out)?;
    // The whole workspace is selected, and a test of it, a small one: so that features, those of its development
    // dependencies among them, are the same as for the tests. Else all of CubeCL is compiled a second time.
    let small = ["--bin", "codegen", "--test", SMALL_TEST];
    run_command(cargo(["build", "--workspace"]).args(small))?;
    let mut generator = Command::new(target_dir().join("debug/codegen"));
    run_command(generator.arg(out).args(prefixes).current_dir(root()))
}

fn clear(folder: &Path) -> Result {
    match folder.exists() {
        true => std::fs::remove_dir_all(folder)
            .map_err(|e| format!("cannot clear {}: {e}", folder.display())),
        false => Ok(()),
    }
}

fn compile(python: &Path, script: &Path, out: &Path, manifest: &Manifest) -> Result<Table> {
    let jobs: Vec<String> = manifest
        .variants
        .iter()
        .flat_map(|variant| variant.arches.iter().map(move |arch| (variant, arch)))
        .map(|(variant, arch)| format!("{}:{arch}:{}", variant.name, variant.shared))
        .collect();
    println!(
        "codegen: {} variants, {} with their architectures",
        manifest.variants.len(),
        jobs.len()
    );
    let mut driver = Command::new(python);
    driver.arg(script).arg(out).arg(out.join(BELIEVED));
    Table::from_rows(&read(driver.args(jobs))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_mode_at_a_time() {
        let of = |text: &str| {
            Mode::of(
                &text
                    .split_whitespace()
                    .map(str::to_owned)
                    .collect::<Vec<_>>(),
            )
        };
        assert!(of("") == Ok(Mode::Check) && of("--fresh") == Ok(Mode::Fresh));
        assert!(of("--bless") == Ok(Mode::Bless) && of("--sources") == Ok(Mode::Sources));
        assert!(of("--blessed").is_err() && of("--bless --fresh").is_err());
    }
}
