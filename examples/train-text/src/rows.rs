//! Results of several runs: a file of JSON, an array with one row per run and line.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A file of rows that one call has for itself.
#[derive(Debug)]
pub struct Held {
    path: PathBuf,
    _file: File,
}

/// Takes a file of rows for one call. Two of them would each write back what it has read at its start. The lock is on a
/// file beside it, because the file of rows is replaced; it ends with the process, however that ends.
///
/// # Errors
///
/// One line, if another call has it.
pub fn hold(path: &Path) -> Result<Held, String> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock = PathBuf::from(name);
    let file = File::create(&lock).map_err(|e| format!("{}: {e}", lock.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(Held {
            path: lock,
            _file: file,
        }),
        Err(TryLockError::WouldBlock) => {
            Err(format!("{}: another call adds rows to it", path.display()))
        }
        Err(TryLockError::Error(e)) => Err(format!("{}: {e}", lock.display())),
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // A file that stays is in nobody's way.
        let _ = fs::remove_file(&self.path);
    }
}

/// The rows of a file, none if it does not exist.
///
/// # Errors
///
/// One line that says which file, and what is wrong with it.
pub fn read<R: DeserializeOwned>(path: &Path) -> Result<Vec<R>, String> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}

/// Writes a file of rows. One that is there is replaced when the new one is complete.
///
/// # Errors
///
/// One line that says which file, and what is wrong with it.
///
/// # Panics
///
/// If a row is not made of fields.
pub fn write<R: Serialize>(path: &Path, rows: &[R]) -> Result<(), String> {
    let line = |row| serde_json::to_string(row).expect("a row's keys are strings");
    let lines: Vec<String> = rows.iter().map(line).collect();
    let text = format!("[\n{}\n]\n", lines.join(",\n"));
    let new = path.with_extension("new");
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    written.map_err(|e| format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_rows_has_one_call_at_a_time() {
        let path = std::env::temp_dir().join(format!("rows-held-{}.json", std::process::id()));
        let held = hold(&path).unwrap();
        let error = hold(&path).unwrap_err();
        assert!(error.ends_with("another call adds rows to it"), "{error}");
        drop(held);
        drop(hold(&path).unwrap());
        let left = fs::exists(path.with_extension("json.lock"));
        assert!(!left.unwrap());
    }
}
