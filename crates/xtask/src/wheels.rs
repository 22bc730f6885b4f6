//! NVIDIA's compilers as Python wheels, in a virtual environment below the target directory.

use crate::process::{Result, run as run_command, write_file};
use std::path::{Path, PathBuf};
use std::process::Command;

/// One toolkit release, 12.9: NVRTC and its headers, and ptxas.
const PACKAGES: [&str; 4] = [
    "nvidia-cuda-nvrtc-cu12==12.9.86",
    "nvidia-cuda-runtime-cu12==12.9.79",
    "nvidia-cuda-cccl-cu12==12.9.27",
    "nvidia-cuda-nvcc-cu12==12.9.86",
];

/// The environment's Python; creates the environment and installs the wheels unless both are there.
///
/// # Errors
/// When Python 3 or its `venv` is missing, or the wheels cannot be installed.
pub fn provide(target: &Path) -> Result<PathBuf> {
    let venv = target.join("cuda-venv");
    let python = venv.join("bin/python");
    let stamp = venv.join("packages");
    let wanted = PACKAGES.join("\n");
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }

    println!(
        "codegen: installing NVIDIA's compilers (wheels, some 130 MB) into {}",
        venv.display()
    );
    run_command(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv)).map_err(|e| {
        format!(
            "{e}\nThe code-generation gate needs Python 3 with venv: `sudo apt-get install python3-venv`, or \
             your distribution's. No other step does."
        )
    })?;
    let mut pip = Command::new(&python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]);
    run_command(pip.args(PACKAGES))?;
    write_file(&stamp, wanted)?;
    Ok(python)
}
