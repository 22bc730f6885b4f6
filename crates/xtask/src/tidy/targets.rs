//! Checks of cargo's targets: no test program is empty, as each would be linked with Burn and LLVM for hundreds of
//! megabytes; existing tests run; and a test runs every program of the examples, and so of the book.

use crate::process::{Result, after, cargo, read};
use std::path::{Path, PathBuf};

struct Target<'a> {
    is_lib: bool,
    name: &'a str,
    root: &'a Path,
    /// True if cargo makes a test program of it: unless the manifest says `test = false`.
    tested: bool,
}

/// Output of `cargo metadata`, in JSON.
pub fn metadata() -> Result<String> {
    let metadata = ["metadata", "--no-deps", "--format-version", "1"];
    read(&mut cargo(metadata))
}

/// Faults of the workspace that `cargo metadata` describes, with its Rust files and their texts.
pub fn faults(metadata: &str, files: &[(PathBuf, String)]) -> Vec<String> {
    let targets = targets(metadata);
    // In two parts, so that this line does not contain it.
    let attribute = ["#[te", "st]"].concat();
    let has_tests = |text: &str| text.lines().any(|line| line.trim() == attribute);
    let with_tests: Vec<_> = (files.iter().filter(|(_, text)| has_tests(text)))
        .filter_map(|(file, _)| Some(owner(&targets, file)?.root))
        .collect();
    let mut faults = Vec::new();
    for target in &targets {
        let (name, root) = (target.name, target.root.display());
        match (with_tests.contains(&target.root), target.tested) {
            (true, false) => faults.push(format!(
                "{root}: the tests of `{name}` do not run: it has `test = false`"
            )),
            (false, true) => faults.push(format!(
                "{root}: `{name}` has no tests: `test = false` saves an empty program"
            )),
            _ => {}
        }
        if !target.is_lib && example(target.root).is_some() && !is_run(target, files) {
            faults.push(format!("{root}: no test runs `{name}`"));
        }
    }
    faults
}

fn targets(metadata: &str) -> Vec<Target<'_>> {
    let parse = |target| {
        let target = str::split_once(target, '}')?.0;
        let is_lib = target.starts_with("lib\"");
        (is_lib || target.starts_with("bin\"")).then_some(Target {
            is_lib,
            name: after(target, "\"name\":\"")?,
            root: Path::new(after(target, "\"src_path\":\"")?),
            tested: target.contains("\"test\":true"),
        })
    };
    let targets = metadata.split("{\"kind\":[\"").skip(1);
    targets.filter_map(parse).collect()
}

/// Target of a file: its own, or that of the `lib.rs` or `main.rs` in the nearest folder above.
fn owner<'a>(targets: &'a [Target<'a>], file: &Path) -> Option<&'a Target<'a>> {
    let owns = |target: &&Target| {
        let has_modules = target.root.ends_with("lib.rs") || target.root.ends_with("main.rs");
        let folder = target.root.parent().filter(|_| has_modules);
        target.root == file || folder.is_some_and(|folder| file.starts_with(folder))
    };
    let depth = |target: &&Target| target.root.components().count();
    let targets = targets.iter().filter(owns);
    targets.max_by_key(|target| (target.root == file, depth(target), target.is_lib))
}

fn example(file: &Path) -> Option<&Path> {
    let is_example = |folder: &&Path| folder.parent().is_some_and(|f| f.ends_with("examples"));
    file.ancestors().find(is_example)
}

/// True if an integration test of the example starts the program, whose path cargo provides in a variable of its
/// name.
fn is_run(program: &Target, files: &[(PathBuf, String)]) -> bool {
    let variable = format!("CARGO_BIN_EXE_{}\"", program.name);
    files.iter().any(|(file, text)| {
        let mut folders = file.ancestors();
        let is_test = folders.any(|folder| folder.ends_with("tests"));
        is_test && example(file) == example(program.root) && text.contains(&variable)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_test_programs_and_tests_and_programs_that_do_not_run_are_found() {
        let target = |kind: &str, name: &str, root: &str, test| {
            format!(r#"{{"kind":["{kind}"],"name":"{name}","src_path":"{root}","test":{test}}},"#)
        };
        let metadata = [
            target("lib", "a", "/a/src/lib.rs", false),
            target("bin", "a", "/a/src/main.rs", true),
            target("bin", "two", "/a/src/bin/2/main.rs", false),
            target("bin", "three", "/a/src/bin/three.rs", true),
            target("test", "all", "/a/tests/all.rs", true),
            target("bin", "b", "/examples/b/src/main.rs", false),
            target("bin", "c", "/examples/b/src/bin/c.rs", false),
        ];
        let test = ["#[te", "st]\nfn t() {}\n"].concat();
        let files = [
            ("/a/src/deep/er.rs", test.as_str()),
            ("/a/src/main.rs", "fn main() {}\n"),
            ("/a/src/bin/2/part.rs", "// no test\n"),
            ("/a/src/bin/three.rs", test.as_str()),
            ("/examples/b/tests/t.rs", "env!(\"CARGO_BIN_EXE_b\")"),
        ];
        let files = files.map(|(file, text)| (file.into(), text.to_owned()));
        let expected = [
            "/a/src/lib.rs: the tests of `a` do not run: it has `test = false`",
            "/a/src/main.rs: `a` has no tests: `test = false` saves an empty program",
            "/examples/b/src/bin/c.rs: no test runs `c`",
        ];
        assert_eq!(faults(&metadata.concat(), &files), expected);
    }

    #[test]
    fn cargo_names_this_program() {
        let metadata = metadata().unwrap();
        let targets = targets(&metadata);
        let this = targets.iter().find(|target| target.name == "xtask");
        assert!(this.is_some_and(|this| this.tested && this.root.ends_with("xtask/src/main.rs")));
    }
}
