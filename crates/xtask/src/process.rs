//! Running other programs, and where the repository is.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The result of a command: a message for the user when it fails.
pub type Result<T = ()> = std::result::Result<T, String>;

/// The repository's root directory.
pub fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest
        .ancestors()
        .nth(2)
        .expect("crates/xtask is two levels below the root")
        .to_path_buf()
}

/// Cargo's output directory.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// A `cargo` command in the root directory, with the cargo that started this program.
///
/// `cargo run` describes this package in environment variables. Build scripts watch some of them (ring's does, and all
/// of CubeCL is built after it): passed on, they would cause a full rebuild whenever one changes between `cargo xtask`
/// and plain cargo.
pub fn cargo<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(args: I) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    for (name, _) in std::env::vars_os() {
        if describes_package(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    command
}

fn describes_package(variable: &str) -> bool {
    [
        "CARGO_PKG_",
        "CARGO_MANIFEST_",
        "CARGO_BIN_",
        "CARGO_CRATE_NAME",
        "CARGO_PRIMARY_PACKAGE",
    ]
    .iter()
    .any(|prefix| variable.starts_with(prefix))
}

/// Runs a command with the terminal's output.
///
/// # Errors
/// When it cannot be started or fails.
pub fn run(command: &mut Command) -> Result {
    let status = command
        .status()
        .map_err(|e| format!("cannot start {}: {e}", shown(command)))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{} failed: {status}", shown(command)))
    }
}

/// Runs a command and returns what it printed on its standard output.
///
/// # Errors
/// When it cannot be started or fails; its standard error goes to the terminal.
pub fn read(command: &mut Command) -> Result<String> {
    command.stderr(Stdio::inherit());
    let output = command
        .output()
        .map_err(|e| format!("cannot start {}: {e}", shown(command)))?;
    if !output.status.success() {
        return Err(format!("{} failed: {}", shown(command), output.status));
    }
    String::from_utf8(output.stdout).map_err(|_| format!("{} printed no UTF-8", shown(command)))
}

/// Refuses options of a command that has none.
///
/// # Errors
/// When there is one.
pub fn no_options(options: &[String]) -> Result {
    match options.first() {
        None => Ok(()),
        Some(option) => Err(format!("unknown option `{option}`")),
    }
}

/// Whether a switch is among the options of a command that has this one alone.
///
/// # Errors
/// When there is another option.
pub fn switch(options: &[String], name: &str) -> Result<bool> {
    match options.iter().find(|o| *o != name) {
        None => Ok(!options.is_empty()),
        Some(option) => Err(format!("unknown option `{option}`")),
    }
}

/// A command as typed in a shell.
pub fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program
        .file_name()
        .unwrap_or(command.get_program())
        .to_string_lossy()
        .into_owned();
    let args = command.get_args().map(|a| a.to_string_lossy().into_owned());
    std::iter::once(name)
        .chain(args)
        .collect::<Vec<_>>()
        .join(" ")
}

/// What follows a mark in JSON, up to the next quotation mark. Paths and names here hold nothing that JSON escapes.
pub fn after<'a>(json: &'a str, mark: &str) -> Option<&'a str> {
    json.split_once(mark)?.1.split('"').next()
}

/// Reads a text file, with its path in the error.
///
/// # Errors
/// When it cannot be read.
pub fn read_file(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

/// Writes a file and the directories it needs, with its path in the error.
///
/// # Errors
/// When it cannot be written.
pub fn write_file(path: &Path, content: impl AsRef<[u8]>) -> Result {
    let write = || {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(path, content.as_ref())
    };
    write().map_err(|e| format!("cannot write {}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_is_not_told_about_this_package() {
        // Cargo sets these for tests, too.
        assert!(std::env::var_os("CARGO_PKG_NAME").is_some());
        let command = cargo(["build"]);
        let removed: Vec<_> = command
            .get_envs()
            .filter(|(_, value)| value.is_none())
            .collect();
        assert!(removed.iter().any(|(name, _)| *name == "CARGO_PKG_NAME"));
        assert!(
            removed
                .iter()
                .any(|(name, _)| *name == "CARGO_MANIFEST_DIR")
        );
        assert!(!describes_package("CARGO_TARGET_DIR"));
        assert!(!describes_package("CARGO_INCREMENTAL"));
    }
}
