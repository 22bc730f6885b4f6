//! The tests that only `cargo xtask test --full` runs: `tests/long.txt` names them.

use crate::process::{Result, read_file, root};
use std::process::Command;

/// Their names, in the order of the file.
pub fn names() -> Result<Vec<String>> {
    Ok(read(&read_file(&root().join("tests/long.txt"))?))
}

fn read(text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim);
    let names = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    names.map(str::to_owned).collect()
}

/// `cargo test` of all others.
pub fn without<'a>(tests: &'a mut Command, names: &[String]) -> &'a mut Command {
    tests.args(["--", "--exact"]);
    for name in names {
        tests.args(["--skip", name]);
    }
    tests
}

/// `cargo test` of these.
pub fn alone<'a>(tests: &'a mut Command, names: &[String]) -> &'a mut Command {
    tests.args(["--tests", "--", "--exact"]).args(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{cargo, shown};

    #[test]
    fn every_test_is_in_one_of_the_two_commands() {
        let names = read("# Why.\n\na::b\n  c\n");
        assert_eq!(names, ["a::b", "c"]);
        let shown =
            |command: &mut Command| shown(command).split_once(" test ").unwrap().1.to_owned();
        let others = shown(without(cargo(["test"]).arg("--workspace"), &names));
        assert_eq!(others, "--workspace -- --exact --skip a::b --skip c");
        let these = shown(alone(cargo(["test"]).arg("--workspace"), &names));
        assert_eq!(these, "--workspace --tests -- --exact a::b c");
    }
}
