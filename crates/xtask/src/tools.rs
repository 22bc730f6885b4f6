//! Checkers that are programs of others, in one version each: built or installed once, below the target directory.

use crate::process::{Result, cargo, root, run as run_command, target_dir};
use crate::wheels::Wheels;
use std::path::Path;
use std::process::Command;

/// A program on crates.io.
#[derive(Clone, Copy, Debug)]
pub struct Tool {
    /// The package that has it.
    package: &'static str,
    /// The program's name.
    program: &'static str,
    /// All machines use the same version, so that a new release of a tool fails nobody's change.
    version: &'static str,
    /// Further options of `cargo install`.
    options: &'static [&'static str],
}

/// Spelling. The wheel has the program that would take two minutes to build.
const TYPOS: Wheels = Wheels {
    folder: "tools/typos",
    what: "typos",
    packages: &["typos==1.52.0"],
};

/// Licences, duplicates and sources of the dependencies.
pub const DENY: Tool = Tool {
    package: "cargo-deny",
    program: "cargo-deny",
    version: "0.20.2",
    options: &[],
};

/// Renders the book.
pub const MDBOOK: Tool = Tool {
    package: "mdbook",
    program: "mdbook",
    version: "0.5.4",
    // No web server, no search index.
    options: &["--no-default-features"],
};

/// The spelling checker, to be run in the repository's root; it is installed first if it is not there yet.
///
/// # Errors
/// When it cannot be installed.
pub fn typos() -> Result<Command> {
    let mut command = Command::new(TYPOS.provide("typos")?);
    command.current_dir(root());
    Ok(command)
}

impl Tool {
    /// The program, to be run in the repository's root; it is built first if it is not there yet.
    ///
    /// # Errors
    /// When it cannot be built.
    pub fn command(&self) -> Result<Command> {
        let folder = target_dir().join("tools");
        let home = folder.join(format!("{}-{}", self.program, self.version));
        let suffix = std::env::consts::EXE_SUFFIX;
        let program = home.join(format!("bin/{}{suffix}", self.program));
        if !program.exists() {
            println!("tools: building {} {}", self.package, self.version);
            let build = folder.join("build");
            run_command(&mut self.install(&home, &build))?;
            // Some hundred megabytes that nothing reads again.
            std::fs::remove_dir_all(&build)
                .map_err(|e| format!("cannot remove {}: {e}", build.display()))?;
        }
        let mut command = Command::new(program);
        command.current_dir(root());
        Ok(command)
    }

    /// Without optimisation: the build takes a minute or less, and each tool runs for a few seconds at most.
    fn install(&self, home: &Path, build: &Path) -> Command {
        let version = format!("={}", self.version);
        let mut install = cargo(["install", self.package, "--locked", "--debug", "--quiet"]);
        install
            .args(["--version", &version])
            .args(self.options)
            .arg("--root")
            .arg(home)
            .arg("--target-dir")
            .arg(build)
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        install
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::shown;

    #[test]
    fn a_tool_is_built_in_its_version_alone() {
        let (home, build) = (Path::new("/home"), Path::new("/build"));
        let install = shown(&MDBOOK.install(home, build));
        let expected = "install mdbook --locked --debug --quiet --version =0.5.4 --no-default-features --root /home \
                        --target-dir /build";
        assert!(install.ends_with(expected), "{install}");
    }
}
