//! A copy of the workspace with every mutant in it, each inactive behind its guard.

use super::table::{Mutant, PATH, with_mutants};
use crate::process::{Result, read, read_file, root, target_dir, write_file};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment variable that names the active mutant.
pub(super) const VARIABLE: &str = "FLASH_DMA_MUTANT";

/// The function added to every mutated crate: whether a mutant is the active one.
const HELPER: &str = r#"
pub(crate) fn mutant(name: &str) -> bool {
    static ACTIVE: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let active = ACTIVE.get_or_init(|| std::env::var("FLASH_DMA_MUTANT").ok());
    active.as_deref() == Some(name)
}
"#;

/// Cargo distinguishes packages of the same name by their version: outputs of this copy must not be mistaken for those
/// of the checkout in the same directory.
const VERSION: [&str; 2] = ["version = \"0.1.0\"", "version = \"0.1.0-mutants\""];

/// The directory of the copy.
pub(super) fn dir() -> PathBuf {
    target_dir().join("mutants").join("src")
}

/// The mismatches between a checkout and the table: every mutant whose text is gone, otherwise inconsistencies.
pub(super) fn faults(root: &Path, mutants: &[Mutant]) -> Vec<String> {
    let alone = |mutant| mutated(root, std::slice::from_ref(mutant)).err();
    let mut faults: Vec<String> = mutants.iter().filter_map(alone).collect();
    if faults.is_empty() {
        faults.extend(mutated(root, mutants).err());
    }
    faults
        .iter()
        .map(|fault| format!("{PATH}: {fault}"))
        .collect()
}

/// The files that have mutants, with the mutants applied.
fn mutated(root: &Path, mutants: &[Mutant]) -> Result<BTreeMap<String, String>> {
    let mut by_file: BTreeMap<&str, Vec<&Mutant>> = BTreeMap::new();
    for mutant in mutants {
        by_file.entry(&mutant.file).or_default().push(mutant);
    }
    let mut texts = BTreeMap::new();
    let mut crates = BTreeSet::new();
    for (file, mutants) in by_file {
        let text = with_mutants(&read_file(&root.join(file))?, &mutants)?;
        texts.insert(file.to_owned(), text);
        let source = file
            .split_once("/src/")
            .ok_or(format!("{file} is no crate's source"))?;
        crates.insert(source.0);
    }
    for name in crates {
        let file = format!("{name}/src/lib.rs");
        let text = match texts.remove(&file) {
            Some(text) => text,
            None => read_file(&root.join(&file))?,
        };
        // The remaining parentheses around an expression cause warnings.
        texts.insert(file, format!("#![allow(warnings)]\n{text}{HELPER}"));
    }
    Ok(texts)
}

/// Brings the copy up to date. Files that stay the same are not touched, so that little is rebuilt.
///
/// # Errors
/// When a mutant does not apply, or a file cannot be read or written.
pub(super) fn update(mutants: &[Mutant]) -> Result {
    let (root, copy) = (root(), dir());
    let mutated = mutated(&root, mutants)?;
    let mut git = Command::new("git");
    let listing = read(git.args(["ls-files", "-z"]).current_dir(&root))?;
    let mut files: BTreeSet<&str> = listing.split_terminator('\0').collect();
    files.retain(|file| root.join(file).is_file());
    for file in &files {
        let content = match (*file, mutated.get(*file)) {
            (_, Some(text)) => text.clone().into_bytes(),
            ("Cargo.toml", _) => versioned(&read_file(&root.join(file))?)?.into_bytes(),
            ("Cargo.lock", _) => versioned_lock(&read_file(&root.join(file))?).into_bytes(),
            _ => std::fs::read(root.join(file)).map_err(|e| format!("cannot read {file}: {e}"))?,
        };
        let to = copy.join(file);
        if std::fs::read(&to).map_or(true, |old| old != content) {
            write_file(&to, content)?;
        }
    }
    remove_others(&copy, &copy, &files)
}

/// The workspace's manifest with the copy's version, which the crates of the workspace ask for among each other, too.
fn versioned(text: &str) -> Result<String> {
    if text.lines().filter(|&line| line == VERSION[0]).count() != 1 {
        return Err(format!("Cargo.toml has not one line `{}`", VERSION[0]));
    }
    Ok(text.replace(VERSION[0], VERSION[1]))
}

/// The lock file with the copy's version for all packages without a source.
fn versioned_lock(text: &str) -> String {
    let packages = text.split("\n\n").map(|package| {
        match package.contains("\nsource = ") || !package.starts_with("[[package]]") {
            true => package.to_owned(),
            false => package.replace(VERSION[0], VERSION[1]),
        }
    });
    packages.collect::<Vec<_>>().join("\n\n")
}

/// Removes the files of the copy that are not, or no longer, in the checkout.
fn remove_others(dir: &Path, copy: &Path, files: &BTreeSet<&str>) -> Result {
    let entries = std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            remove_others(&path, copy, files)?;
            continue;
        }
        let name = path.strip_prefix(copy).unwrap_or(&path).to_string_lossy();
        if !files.contains(&*name) {
            std::fs::remove_file(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_packages_have_the_version_of_the_copy() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"0.1.0\"\nsource = \"registry\"\n\n\
                    [[package]]\nname = \"b\"\nversion = \"0.1.0\"\n";
        let changed = versioned_lock(lock);
        assert!(changed.starts_with(&lock[..lock.len() - 10]));
        assert!(changed.ends_with("name = \"b\"\nversion = \"0.1.0-mutants\"\n"));
        let own = "version = \"0.1.0\"\n\nb = { version = \"0.1.0\", path = \"b\" }\n";
        assert_eq!(versioned(own).unwrap().matches("0.1.0-mutants").count(), 2);
        assert!(versioned("b = { version = \"0.1.0\" }\n").is_err());
    }
}
