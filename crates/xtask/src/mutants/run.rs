//! Building the copy and running its test programs.

use super::copy::{VARIABLE, dir};
use super::table::{Mutant, PROGRAMS};
use crate::process::{Result, cargo, read, read_file, target_dir};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long the tests of one mutant may take. A mutant may loop forever.
const LIMIT: Duration = Duration::from_secs(240);

/// The test programs by their name in the table: its working directory and its path.
pub(super) type Programs = BTreeMap<&'static str, (PathBuf, PathBuf)>;

/// How a run of some tests ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    Passed,
    /// Failed, with the first test that did.
    Failed(String),
    /// Ended without a summary.
    Crashed(String),
    TimedOut,
}

/// Builds the test programs of the copy.
///
/// # Errors
/// When something does not build, or a program is missing.
pub(super) fn build() -> Result<Programs> {
    let copy = dir();
    // The whole workspace, whose features the dependencies have been built with.
    let mut build = cargo(["test", "--workspace", "--no-run", "--lib"]);
    build.args(["--test", "main", "--test", "suite", "--test", "generate"]);
    build.args(["--message-format", "json-render-diagnostics"]);
    build
        .env("CARGO_TARGET_DIR", target_dir())
        .current_dir(&copy);
    let messages = read(&mut build)?;
    let mut programs = Programs::new();
    for message in messages.lines() {
        for (name, package, unit) in PROGRAMS {
            if let Some(path) = executable(message, &copy.join(package), unit) {
                programs.insert(name, (copy.join(package), path));
            }
        }
    }
    match PROGRAMS
        .iter()
        .find(|(name, ..)| !programs.contains_key(name))
    {
        None => Ok(programs),
        Some((name, ..)) => Err(format!("cargo built no program `{name}`")),
    }
}

/// The path of a package's test program, if one of cargo's messages names it.
pub(super) fn executable(message: &str, package: &Path, unit: bool) -> Option<PathBuf> {
    let after = |mark: &str| Some(message.split_once(mark)?.1.split('"').next()?.to_owned());
    let manifest = package.join("Cargo.toml");
    let kind = after("\"target\":{\"kind\":[\"")?;
    let path = after("\"executable\":\"")?;
    let wanted = if unit { "lib" } else { "test" };
    (kind == wanted && after("\"manifest_path\":\"")? == manifest.to_string_lossy())
        .then(|| PathBuf::from(path))
}

/// Runs the tests of a program that match the filters, with a mutant or none.
///
/// # Errors
/// When the program cannot be started, or no test matches.
pub(super) fn tests(
    programs: &Programs,
    program: &str,
    filters: &[String],
    mutant: Option<&Mutant>,
    limit: Option<Duration>,
) -> Result<End> {
    let (place, path) = &programs[program];
    let log = target_dir().join("mutants").join("last.log");
    let file = File::create(&log).map_err(|e| format!("{}: {e}", log.display()))?;
    let errors = file.try_clone().map_err(|e| e.to_string())?;
    let mut command = Command::new(path);
    command
        .args(filters)
        .current_dir(place)
        .stdin(Stdio::null());
    command.stdout(file).stderr(errors).env_remove(VARIABLE);
    if let Some(mutant) = mutant {
        command.env(VARIABLE, &mutant.name);
    }
    let started = |e: std::io::Error| format!("cannot run {}: {e}", path.display());
    let mut child = command.spawn().map_err(started)?;
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().map_err(started)? {
            break status;
        }
        if limit.is_some_and(|limit| start.elapsed() > limit) {
            child.kill().and_then(|()| child.wait()).map_err(started)?;
            return Ok(End::TimedOut);
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let text = read_file(&log).unwrap_or_default();
    if text.contains("\nrunning 0 tests") {
        return Err(format!("no test of `{program}` matches {filters:?}"));
    }
    Ok(end_of(&text, status.success(), &status.to_string()))
}

/// The result according to a program's output.
fn end_of(text: &str, success: bool, status: &str) -> End {
    if success {
        return End::Passed;
    }
    let failed = text.lines().find_map(|line| {
        // Output that bypasses the capture may precede it.
        let name = line.split_once("test ")?.1.strip_suffix(" ... FAILED")?;
        Some(name.to_owned())
    });
    match failed {
        Some(name) => End::Failed(name),
        None => End::Crashed(status.to_owned()),
    }
}

/// Runs a mutant's tests, in the order of the table, until some do not pass.
///
/// # Errors
/// As [`tests`].
pub(super) fn kill(programs: &Programs, mutant: &Mutant) -> Result<End> {
    for (program, filters) in &mutant.kill {
        let end = tests(programs, program, filters, Some(mutant), Some(LIMIT))?;
        if end != End::Passed {
            return Ok(end);
        }
    }
    Ok(End::Passed)
}

#[cfg(test)]
mod tests_of_outputs {
    use super::*;

    #[test]
    fn the_first_failed_test_is_named() {
        let text = "running 2 tests\ntest a::b ... ok\nskipped: x on y\ntest a::c ... FAILED\n";
        assert_eq!(end_of(text, false, "1"), End::Failed("a::c".into()));
        assert_eq!(end_of(text, true, "0"), End::Passed);
        assert_eq!(
            end_of("running 2 tests\n", false, "signal 6"),
            End::Crashed("signal 6".into())
        );
    }

    #[test]
    fn a_test_program_is_found_by_its_package() {
        let message = r#"{"reason":"compiler-artifact","package_id":"path+file:///r/crates/a#0.1.0","manifest_path":"/r/crates/a/Cargo.toml","target":{"kind":["lib"],"crate_types":["lib"],"name":"a","src_path":"/r/a"},"executable":"/t/a-1","fresh":false}"#;
        let package = Path::new("/r/crates/a");
        assert_eq!(executable(message, package, true), Some("/t/a-1".into()));
        assert_eq!(executable(message, package, false), None);
        assert_eq!(executable(message, Path::new("/r/crates/b"), true), None);
        let library = message.replace("\"/t/a-1\"", "null");
        assert_eq!(executable(&library, package, true), None);
    }
}
