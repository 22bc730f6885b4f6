//! Programs that are published as Python wheels, in virtual environments below the target directory.

use crate::process::{Result, run as run_command, target_dir, write_file};
use std::path::PathBuf;
use std::process::Command;

/// A virtual environment.
#[derive(Clone, Copy, Debug)]
pub struct Wheels {
    /// Its folder below the target directory.
    pub folder: &'static str,
    /// What is installed, for the user who waits for it.
    pub what: &'static str,
    /// The packages, each in one version, without what they depend on.
    pub packages: &'static [&'static str],
}

impl Wheels {
    /// A program of the environment by its name, as `python`; creates the environment and installs the wheels unless
    /// both are there.
    ///
    /// # Errors
    /// When Python 3 or its `venv` is missing, or the wheels cannot be installed.
    pub fn provide(&self, program: &str) -> Result<PathBuf> {
        let venv = target_dir().join(self.folder);
        let stamp = venv.join("packages");
        let wanted = self.packages.join("\n");
        if !std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
            println!("installing {} into {}", self.what, venv.display());
            let create = ["-m", "venv", "--clear"];
            run_command(Command::new("python3").args(create).arg(&venv)).map_err(|e| {
                format!(
                    "{e}\nPython 3 with venv is needed: `sudo apt-get install python3-venv`, or your distribution's"
                )
            })?;
            let mut pip = Command::new(venv.join("bin/python"));
            pip.args(["-m", "pip", "install", "--quiet", "--no-deps"]);
            pip.arg("--disable-pip-version-check");
            run_command(pip.args(self.packages))?;
            write_file(&stamp, wanted)?;
        }
        Ok(venv.join("bin").join(program))
    }
}
