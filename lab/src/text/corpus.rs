//! From files to one text of bytes.

use crate::Result;
use std::fs;
use std::path::{Path, PathBuf};

/// Directories without text written by people.
const SKIPPED_DIRECTORIES: [&str; 2] = ["target", "runs"];

/// The text to train on.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// Path of the source.
    pub source: PathBuf,
    /// The text.
    pub bytes: Vec<u8>,
}

impl Corpus {
    /// Reads a file, or every UTF-8 file under a directory in the order of their paths. Skips hidden entries,
    /// `target` and `runs`.
    pub fn read(path: &Path) -> Result<Self> {
        let failed = |error| format!("{}: {error}", path.display());
        let bytes = match fs::metadata(path).map_err(failed)?.is_dir() {
            true => joined(path).map_err(failed)?,
            false => fs::read(path).map_err(failed)?,
        };
        if bytes.is_empty() {
            return Err(format!("{}: no text to train on", path.display()).into());
        }
        let source = path.into();
        Ok(Self { source, bytes })
    }

    /// Fingerprint of the text (FNV-1a): rows of other texts do not compare.
    pub fn fingerprint(&self) -> String {
        let hash = (self.bytes.iter()).fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        format!("{hash:016x}")
    }
}

fn joined(directory: &Path) -> std::io::Result<Vec<u8>> {
    let (mut paths, mut bytes) = (Vec::new(), Vec::new());
    walk(directory, &mut paths)?;
    // By components: the order does not depend on the system's separator or locale.
    paths.sort();
    for path in paths {
        let text = fs::read(path)?;
        if text.is_empty() || std::str::from_utf8(&text).is_err() {
            continue;
        }
        if !bytes.is_empty() {
            bytes.push(b'\n');
        }
        bytes.extend(text);
    }
    Ok(bytes)
}

fn walk(directory: &Path, paths: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let (path, name, kind) = (entry.path(), entry.file_name(), entry.file_type()?);
        let name = name.to_string_lossy();
        // A symbolic link is neither a directory nor a file, so links cannot make the walk endless.
        if name.starts_with('.') {
            continue;
        }
        if kind.is_dir() && !SKIPPED_DIRECTORIES.contains(&name.as_ref()) {
            walk(&path, paths)?;
        } else if kind.is_file() {
            paths.push(path);
        }
    }
    Ok(())
}
