//! The documentation of every library, by the libraries that its tests are built with: `cargo doc` would check each
//! dependency once more, for minutes.

use crate::process::{Result, run as run_command};
use std::ffi::OsString;
use std::process::Command;

/// Set where this program stands in for rustdoc: the folder of the documentation.
const FOLDER: &str = "XTASK_DOCUMENTATION";

/// Options by which cargo has rustdoc run tests, and the number of arguments behind each.
const OF_TESTS: [(&str, usize); 3] = [
    ("--test", 0),
    ("--test-run-directory", 1),
    ("--test-args", 1),
];

/// Documents each library whose documentation tests `cargo test` would run; warnings are errors.
pub fn build(cargo_test: &mut Command, folder: OsString) -> Result {
    let program = std::env::current_exe().map_err(|e| format!("this program has no path: {e}"))?;
    cargo_test.arg("--doc").env("RUSTDOC", program);
    run_command(cargo_test.env(FOLDER, folder))
}

/// Does what cargo asks of rustdoc, if this program stands in for it.
pub fn stand_in(arguments: impl Iterator<Item = OsString>) -> Option<Result> {
    let folder = std::env::var_os(FOLDER)?;
    let mut rustdoc = Command::new("rustdoc");
    rustdoc.args(without_tests(arguments));
    rustdoc.args(["-D", "warnings", "--out-dir"]).arg(folder);
    rustdoc.env_remove(FOLDER);
    Some(run_command(&mut rustdoc))
}

fn without_tests(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        match OF_TESTS.iter().find(|(option, _)| argument == *option) {
            Some((_, values)) => arguments.by_ref().take(*values).for_each(drop),
            None => kept.push(argument),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_of_tests_are_left_out() {
        let of_cargo =
            "--crate-name a --test src/lib.rs --test-run-directory /a --test-args --quiet -L b";
        let kept = without_tests(of_cargo.split(' ').map(OsString::from));
        assert_eq!(kept, ["--crate-name", "a", "src/lib.rs", "-L", "b"]);
        assert!(stand_in(std::iter::empty()).is_none());
    }
}
