//! Reads records; an error names the file.

use serde::de::DeserializeOwned;
use std::path::Path;

/// A file as it is.
pub(super) fn text(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

/// A file that is one value.
pub(super) fn json<T: DeserializeOwned>(path: &Path) -> Result<T, String> {
    serde_json::from_str(&text(path)?).map_err(|e| format!("{}: {e}", path.display()))
}

/// A file with a value in each line; empty lines are none.
pub(super) fn json_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, String> {
    let text = text(path)?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| serde_json::from_str(line).map_err(|e| format!("{}: {e}", path.display())))
        .collect()
}
