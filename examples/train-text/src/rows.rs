//! Results of several runs: a file of JSON, an array with one row per run and line.

use std::fs;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

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
