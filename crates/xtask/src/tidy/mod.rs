//! `cargo xtask tidy`: the house rules that no other tool checks.

mod circles;
mod links;
mod targets;

use crate::process::{Result, read_file, root};
use std::path::{Path, PathBuf};

/// Checks the rules. The error lists every place that breaks one.
pub fn run() -> Result {
    let root = root();
    let files = files(&root)?;
    let (mut faults, mut sources) = (Vec::new(), Vec::new());
    for path in &files {
        let name = path.strip_prefix(&root).unwrap_or(path);
        let name = name.display().to_string();
        match path.extension().and_then(|e| e.to_str()) {
            Some("rs") => {
                let text = read_file(path)?;
                loop_faults(&name, &text, &mut faults);
                sources.push((path.clone(), text));
            }
            Some("md") => links::faults(path, &read_file(path)?, &name, &mut faults),
            Some("toml") if path.ends_with("Cargo.toml") => {
                let text = read_file(path)?;
                if !text.contains("[lints]\nworkspace = true") && !text.contains("[workspace]") {
                    faults.push(format!("{name}: does not take the workspace's lints"));
                }
            }
            _ => {}
        }
    }
    circles::faults(&root, &sources, &mut faults);
    faults.extend(targets::faults(&targets::metadata()?, &sources));
    if faults.is_empty() {
        println!("tidy: {} files follow the house rules", files.len());
        return Ok(());
    }
    Err(format!("house rules broken:\n  {}", faults.join("\n  ")))
}

/// Folders of the tensor-core passes, whose main loops should be readable in one sitting.
const KERNELS: [&str; 4] = [
    "crates/flash-dma-kernels/src/forward/mma.rs",
    "crates/flash-dma-kernels/src/forward/wgmma.rs",
    "crates/flash-dma-kernels/src/backward/dq/",
    "crates/flash-dma-kernels/src/backward/dkdv/",
];

/// Maximum number of lines of a loop there, from its head to its closing brace.
const LIMIT: usize = 60;

/// Adds loops that are too long. rustfmt formats the code, so the first later line with a brace at the loop's
/// indentation closes it.
fn loop_faults(name: &str, text: &str, faults: &mut Vec<String>) {
    if !KERNELS.iter().any(|kernels| name.starts_with(kernels)) {
        return;
    }
    let lines: Vec<_> = text.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let mut heads = ["for ", "while ", "loop "].iter();
        if heads.any(|head| code.starts_with(head)) {
            let close = format!("{}}}", &line[..line.len() - code.len()]);
            let rest = lines[number..].iter();
            let length = rest.take_while(|line| **line != close).count() + 1;
            if length > LIMIT {
                let what = format!("a loop of {length} lines, {LIMIT} are the most");
                faults.push(format!("{name}:{}: {what}", number + 1));
            }
        }
    }
}

fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries = std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    for entry in entries {
        let path = entry.map_err(|e| format!("{}: {e}", dir.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') || ["target", "runs", "gpu-pack", "__pycache__"].contains(&&*name)
        {
            continue;
        }
        match path.is_dir() && !path.is_symlink() {
            true => files.extend(self::files(&path)?),
            false => files.push(path),
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_are_measured_to_their_closing_brace() {
        let of_length = |lines: usize, file: &str| {
            let body = "        g();\n".repeat(lines - 2);
            let text = format!("fn f() {{\n    for n in 0..2 {{\n{body}    }}\n}}\n");
            let mut found = Vec::new();
            loop_faults(file, &text, &mut found);
            found
        };
        assert!(of_length(LIMIT, KERNELS[0]).is_empty());
        let found = of_length(LIMIT + 1, KERNELS[0]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("mma.rs:2: a loop of 61 lines"));
        // Loops in other files may be of any length.
        assert!(of_length(LIMIT + 1, "crates/xtask/src/main.rs").is_empty());
    }
}
