//! `cargo xtask tidy`: the house rules that no other tool checks.

mod empty;
mod links;
mod loops;
mod programs;

use crate::mutants;
use crate::process::{Result, read_file, root};
use std::path::{Path, PathBuf};

/// Checks the rules.
///
/// # Errors
/// When a rule is broken: the text lists every place.
pub fn run() -> Result {
    let root = root();
    let files = files(&root)?;
    let mut faults = mutants::faults(&root);
    programs::faults(&root.join("examples"), &mut faults)?;
    for path in &files {
        let name = path
            .strip_prefix(&root)
            .unwrap_or(path)
            .display()
            .to_string();
        match path.extension().and_then(|e| e.to_str()) {
            Some("rs") => {
                let text = read_file(path)?;
                source_faults(&name, &text, &mut faults);
                loops::faults(&name, &text, &mut faults);
            }
            Some("md") => links::faults(path, &read_file(path)?, &name, &mut faults),
            Some("toml") if path.ends_with("Cargo.toml") && *path != root.join("Cargo.toml") => {
                let text = read_file(path)?;
                manifest_faults(&name, &text, &mut faults);
                let dir = path.parent().unwrap_or(&root);
                empty::faults(dir, &text, &name, &mut faults)?;
            }
            _ => {}
        }
    }
    if faults.is_empty() {
        println!("tidy: {} files follow the house rules", files.len());
        Ok(())
    } else {
        Err(format!("house rules broken:\n  {}", faults.join("\n  ")))
    }
}

/// The faults of a Rust file.
fn source_faults(name: &str, text: &str, faults: &mut Vec<String>) {
    for (number, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        // Written in parts, so that this file passes.
        for leftover in ["todo", "unimplemented", "dbg"].map(|word| format!("{word}!(")) {
            if code.contains(&leftover) {
                faults.push(format!("{name}:{}: {leftover}..)", number + 1));
            }
        }
    }
}

/// The faults of a crate's manifest.
fn manifest_faults(name: &str, text: &str, faults: &mut Vec<String>) {
    if !text.contains("[lints]\nworkspace = true") {
        faults.push(format!("{name}: does not take the workspace's lints"));
    }
}

/// The repository's files, in order, without hidden files and build outputs.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        let entries = std::fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        for entry in entries {
            let entry = entry.map_err(|e| format!("{}: {e}", dir.display()))?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with('.')
                || ["target", "runs", "gpu-pack", "__pycache__"].contains(&&*name)
            {
                continue;
            }
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => dirs.push(entry.path()),
                Ok(kind) if kind.is_file() => files.push(entry.path()),
                _ => {}
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_and_long_files_are_found() {
        let mut faults = Vec::new();
        let leftover = ["fn a() { to", "do!() } // to", "do!() in a comment"].concat();
        source_faults("a.rs", &format!("\n{leftover}\n"), &mut faults);
        assert_eq!(faults, [["a.rs:2: to", "do!(..)"].concat()]);
    }
}
