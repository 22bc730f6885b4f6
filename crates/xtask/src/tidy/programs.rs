//! Every program of the examples, and so of the book, is run by a test.

use crate::process::{Result, read_file};
use std::path::Path;

/// The programs of the crates in a folder that no test of their crate starts. Cargo gives tests the path of a program by
/// a variable of its name.
///
/// # Errors
/// When a file cannot be read.
pub fn faults(examples: &Path, faults: &mut Vec<String>) -> Result {
    for example in entries(examples)? {
        if !example.join("Cargo.toml").exists() {
            continue;
        }
        let mut tests = String::new();
        read_tests(&example.join("tests"), &mut tests)?;
        for program in programs(&example)? {
            if !tests.contains(&format!("CARGO_BIN_EXE_{program}\"")) {
                let example = example.file_name().unwrap_or_default().to_string_lossy();
                faults.push(format!("examples/{example}: no test runs `{program}`"));
            }
        }
    }
    Ok(())
}

/// Appends the Rust files in a folder and in its folders.
fn read_tests(folder: &Path, tests: &mut String) -> Result {
    for path in entries(folder)? {
        if path.is_dir() {
            read_tests(&path, tests)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            *tests += &read_file(&path)?;
        }
    }
    Ok(())
}

/// The names of a crate's programs: its own, and one for each file in `src/bin`.
fn programs(example: &Path) -> Result<Vec<String>> {
    let mut programs = Vec::new();
    let name = |path: &Path| {
        path.file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    };
    if example.join("src/main.rs").exists() {
        programs.push(name(example));
    }
    programs.extend(
        entries(&example.join("src/bin"))?
            .iter()
            .map(|path| name(path)),
    );
    Ok(programs)
}

/// The files and folders in a folder, in order; none if it is missing.
fn entries(folder: &Path) -> Result<Vec<std::path::PathBuf>> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Ok(Vec::new());
    };
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| format!("{}: {e}", folder.display()))?;
        paths.push(entry.path());
    }
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{root, write_file};

    #[test]
    fn a_program_without_a_test_is_found() {
        let folder = std::env::temp_dir().join(format!("tidy-programs-{}", std::process::id()));
        for (file, text) in [
            ("one/Cargo.toml", ""),
            ("one/src/main.rs", ""),
            ("one/src/bin/two.rs", ""),
            ("one/tests/it/a.rs", "env!(\"CARGO_BIN_EXE_one\")"),
            ("README.md", ""),
        ] {
            write_file(&folder.join(file), text).unwrap();
        }
        let mut found = Vec::new();
        let read = faults(&folder, &mut found);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(read, Ok(()));
        assert_eq!(found, ["examples/one: no test runs `two`"]);
    }

    #[test]
    fn the_examples_programs_are_found() {
        let tutorial = programs(&root().join("examples/tutorial")).unwrap();
        assert_eq!(tutorial, ["tutorial"]);
    }
}
