//! No test program is empty: where a library or a program has no unit tests, its manifest says `test = false`. Each
//! such program would be linked with Burn and LLVM, for hundreds of megabytes. Where there are tests, they run.

use crate::process::{Result, read_file};
use std::path::{Path, PathBuf};

/// A library or a program of a crate.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    name: String,
    root: PathBuf,
    /// Whether cargo makes a test program of it.
    tested: bool,
}

/// The targets of the crate at `dir` that are tested in vain, or not tested though they have tests.
///
/// # Errors
/// When a file cannot be read.
pub fn faults(dir: &Path, manifest: &str, name: &str, faults: &mut Vec<String>) -> Result {
    for target in targets(dir, manifest) {
        let has_tests = has_tests(&target.root)?;
        if has_tests == target.tested {
            continue;
        }
        let target = target.name;
        faults.push(match has_tests {
            true => format!("{name}: the tests of `{target}` do not run: it has `test = false`"),
            false => {
                format!("{name}: `{target}` has no tests: `test = false` saves an empty program")
            }
        });
    }
    Ok(())
}

/// What cargo finds in a crate, and what the manifest says of it.
fn targets(dir: &Path, manifest: &str) -> Vec<Target> {
    let own = value(manifest, "name").unwrap_or_default();
    let mut found = Vec::new();
    let mut add = |name: &str, root: PathBuf| {
        if root.exists() {
            let (name, tested) = (name.to_owned(), true);
            found.push(Target { name, root, tested });
        }
    };
    add("lib", dir.join("src/lib.rs"));
    add(&own, dir.join("src/main.rs"));
    let programs = std::fs::read_dir(dir.join("src/bin"));
    for program in programs.into_iter().flatten().flatten() {
        let path = program.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        match path.is_dir() {
            true => add(&name, path.join("main.rs")),
            false => add(&name, path.clone()),
        }
    }
    // What has a section: `[lib]`, or `[[bin]]` with a name and maybe a path.
    for section in manifest.split("\n[").skip(1) {
        let (head, body) = section.split_once('\n').unwrap_or_default();
        let (name, path) = (value(body, "name"), value(body, "path"));
        let is = |target: &&mut Target| match (head, &path) {
            ("lib]", _) => target.name == "lib",
            ("[bin]]", Some(path)) => target.root == dir.join(path),
            ("[bin]]", None) => Some(&target.name) == name.as_ref(),
            _ => false,
        };
        if let Some(target) = found.iter_mut().find(is) {
            target.tested = !body.lines().any(|line| line == "test = false");
            target.name = name.unwrap_or_else(|| target.name.clone());
        }
    }
    found
}

/// The text of a field.
fn value(section: &str, field: &str) -> Option<String> {
    let mut lines = section.lines().filter_map(|line| line.split_once(" = "));
    let (_, value) = lines.find(|(name, _)| *name == field)?;
    Some(value.trim_matches('"').to_owned())
}

/// Whether a file has a unit test, or a module of its own files has.
fn has_tests(root: &Path) -> Result<bool> {
    let mut files = vec![(root.to_path_buf(), root.parent().map(Path::to_path_buf))];
    while let Some((file, modules)) = files.pop() {
        let (text, modules) = (read_file(&file)?, modules.unwrap_or_default());
        // In two parts, so that this line is none.
        let attribute = ["#[te", "st]"].concat();
        if text.lines().any(|line| line.trim() == attribute) {
            return Ok(true);
        }
        let mut path = None;
        for line in text.lines().map(str::trim) {
            if let Some(given) = line.strip_prefix("#[path = \"") {
                path = given.strip_suffix("\"]");
                continue;
            }
            let declared = line.strip_suffix(';').and_then(|line| {
                let (visibility, name) = line.split_once("mod ")?;
                (visibility.is_empty() || visibility.starts_with("pub")).then_some(name)
            });
            if let Some(name) = declared {
                let beside = file.parent().unwrap_or(&modules);
                let candidates = match path {
                    Some(path) => vec![beside.join(path)],
                    None => ["", "/mod"]
                        .map(|end| modules.join(format!("{name}{end}.rs")))
                        .into(),
                };
                let found = candidates.into_iter().find(|file| file.exists());
                files.extend(found.map(|file| (file, Some(modules.join(name)))));
            }
            if !line.starts_with("#[") {
                path = None;
            }
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::write_file;

    #[test]
    fn empty_test_programs_and_tests_that_do_not_run_are_found() {
        let dir = std::env::temp_dir().join(format!("tidy-empty-{}", std::process::id()));
        let test = ["#[te", "st]\nfn t() {}\n"].concat();
        let manifest = "[package]\nname = \"a\"\n\n[lib]\ntest = false\n\n[[bin]]\nname = \"two\"\npath = \
                        \"src/bin/2/main.rs\"\ntest = false\n\n[[bench]]\nname = \"b\"\ntest = false\n";
        for (file, text) in [
            ("src/lib.rs", "mod deep;\n"),
            ("src/deep.rs", "pub(crate) mod er;\n"),
            (
                "src/deep/er.rs",
                "#[cfg(test)]\n#[path = \"of.rs\"]\nmod tests;\n",
            ),
            ("src/deep/of.rs", test.as_str()),
            ("src/main.rs", "fn main() {}\n"),
            ("src/bin/2/main.rs", "mod part;\n"),
            ("src/bin/2/part.rs", "// no test\n"),
            ("src/bin/three.rs", test.as_str()),
        ] {
            write_file(&dir.join(file), text).unwrap();
        }
        let mut found = Vec::new();
        let read = faults(&dir, manifest, "Cargo.toml", &mut found);
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(read, Ok(()));
        assert_eq!(
            found,
            [
                "Cargo.toml: the tests of `lib` do not run: it has `test = false`",
                "Cargo.toml: `a` has no tests: `test = false` saves an empty program",
            ]
        );
    }
}
