//! Third-party programs, in one version each, so that a new release breaks nobody's change: built or installed once,
//! below the target directory.

use crate::process::{Result, cargo, remove_dir, root, run as run_command, target_dir, write_file};
use std::process::Command;

/// A program on crates.io, named like its package.
#[derive(Clone, Copy, Debug)]
pub struct Tool {
    package: &'static str,
    version: &'static str,
    options: &'static [&'static str],
}

/// Licences, duplicates and sources of the dependencies.
pub const DENY: Tool = Tool {
    package: "cargo-deny",
    version: "0.20.2",
    options: &[],
};

/// Renders the book.
pub const MDBOOK: Tool = Tool {
    package: "mdbook",
    version: "0.5.4",
    // No web server, no search index.
    options: &["--no-default-features"],
};

impl Tool {
    /// The program, to be run in the repository's root. Builds it first if it is missing: without optimisation, as
    /// that takes a minute at most, and each tool runs for a few seconds.
    pub fn command(&self) -> Result<Command> {
        let folder = target_dir().join("tools");
        let home = folder.join(format!("{}-{}", self.package, self.version));
        let suffix = std::env::consts::EXE_SUFFIX;
        let program = home.join(format!("bin/{}{suffix}", self.package));
        if !program.exists() {
            println!("tools: building {} {}", self.package, self.version);
            let build = folder.join("build");
            let mut install = cargo(["install", self.package, "--locked", "--debug", "--quiet"]);
            install.args(["--version", &format!("={}", self.version)]);
            install.args(self.options).arg("--root").arg(&home);
            install.arg("--target-dir").arg(&build);
            run_command(install.env("CARGO_PROFILE_DEV_DEBUG", "0"))?;
            // Some hundred megabytes that are not read again.
            remove_dir(&build)?;
        }
        let mut command = Command::new(program);
        command.current_dir(root());
        Ok(command)
    }
}

/// Programs published as Python wheels, in a virtual environment.
#[derive(Clone, Copy, Debug)]
pub struct Wheels {
    /// Folder below the target directory.
    pub folder: &'static str,
    /// Description for the user who waits for it.
    pub what: &'static str,
    /// Packages, each in one version, without their dependencies.
    pub packages: &'static [&'static str],
}

/// Spelling. The wheel contains the program, which would take two minutes to build.
pub const TYPOS: Wheels = Wheels {
    folder: "tools/typos",
    what: "typos",
    packages: &["typos==1.52.0"],
};

impl Wheels {
    /// A program of the environment by its name, such as `python`, to be run in the repository's root; creates the
    /// environment and installs the wheels unless both exist.
    pub fn command(&self, program: &str) -> Result<Command> {
        let venv = target_dir().join(self.folder);
        let stamp = venv.join("packages");
        let wanted = self.packages.join("\n");
        if !std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
            println!("installing {} into {}", self.what, venv.display());
            let create = ["-m", "venv", "--clear"];
            run_command(Command::new("python3").args(create).arg(&venv)).map_err(|e| {
                format!("{e}\nPython 3 with venv is needed: `cargo xtask setup` installs it")
            })?;
            let mut pip = Command::new(venv.join("bin/python"));
            pip.args(["-m", "pip", "install", "--quiet", "--no-deps"]);
            pip.arg("--disable-pip-version-check");
            run_command(pip.args(self.packages))?;
            write_file(&stamp, wanted)?;
        }
        let mut command = Command::new(venv.join("bin").join(program));
        command.current_dir(root());
        Ok(command)
    }
}
