//! Running of other programs, and the repository's location.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

/// The result of a command: a message for the user when it fails.
pub type Result<T = ()> = std::result::Result<T, String>;

/// The repository's root directory.
pub fn root() -> PathBuf {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.nth(2).expect("two levels below the root").into()
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
/// `cargo run` describes this package in environment variables, some of which build scripts watch (such as ring's,
/// and all of CubeCL is built after it): passed on, they would cause a full rebuild whenever one changes between
/// `cargo xtask` and plain cargo.
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

/// A `cargo` command with clippy as the compiler, which lints the workspace's crates while it builds them. `cargo
/// clippy` would check every dependency once more, for a third of the time of a full build.
pub fn linting<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(args: I) -> Command {
    let mut command = cargo(args);
    command.env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver");
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
pub fn run(command: &mut Command) -> Result {
    let status = command.status();
    succeeded(command, status)
}

fn succeeded(command: &Command, status: io::Result<ExitStatus>) -> Result {
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{} failed: {status}", shown(command))),
        Err(e) => Err(format!("cannot start {}: {e}", shown(command))),
    }
}

/// Runs a command and returns its standard output; its standard error goes to the terminal.
pub fn read(command: &mut Command) -> Result<String> {
    let mut printed = Vec::new();
    let output = command.stderr(Stdio::inherit()).output().map(|output| {
        printed = output.stdout;
        output.status
    });
    succeeded(command, output)?;
    String::from_utf8(printed).map_err(|_| format!("{} printed no UTF-8", shown(command)))
}

/// Refuses options of a command that has none.
pub fn no_options(options: &[String]) -> Result {
    match options.first() {
        None => Ok(()),
        Some(option) => Err(format!("unknown option `{option}`")),
    }
}

/// True if the switch is given, to a command that has no other option.
pub fn switch(options: &[String], name: &str) -> Result<bool> {
    match options.iter().find(|o| *o != name) {
        None => Ok(!options.is_empty()),
        Some(option) => Err(format!("unknown option `{option}`")),
    }
}

/// A command as typed in a shell.
pub fn shown(command: &Command) -> String {
    let program = command.get_program();
    let name = Path::new(program).file_name().unwrap_or(program);
    let words: Vec<_> = [name].into_iter().chain(command.get_args()).collect();
    words.join(OsStr::new(" ")).to_string_lossy().into_owned()
}

/// Text after a mark in JSON, up to the next quotation mark. Paths and names here need no escapes.
pub fn after<'a>(json: &'a str, mark: &str) -> Option<&'a str> {
    json.split_once(mark)?.1.split('"').next()
}

/// Reads a text file, with its path in the error.
pub fn read_file(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

/// Removes a directory and all below it, if it exists.
pub fn remove_dir(dir: &Path) -> Result {
    if !dir.exists() {
        return Ok(());
    }
    std::fs::remove_dir_all(dir).map_err(|e| format!("cannot remove {}: {e}", dir.display()))
}

/// Writes a file and the directories it needs, with its path in the error.
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
        for name in ["CARGO_PKG_NAME", "CARGO_MANIFEST_DIR"] {
            let removed = (OsStr::new(name), None);
            assert!(command.get_envs().any(|env| env == removed), "{name}");
        }
        assert!(!describes_package("CARGO_TARGET_DIR"));
        assert!(!describes_package("CARGO_INCREMENTAL"));
    }
}
