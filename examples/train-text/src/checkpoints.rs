//! What burn-train leaves in a run's directory, and from where to go on.

use std::fs;
use std::path::Path;

use burn::optim::OptimizerRecord;
use burn::optim::lr_scheduler::LrSchedulerRecord;
use burn::store::ModuleRecord;

use crate::error::Error;

/// The newest epoch of which model, optimiser and schedule can all be loaded.
///
/// A run that was killed may have written only a part of its last checkpoint.
pub fn last(dir: &Path) -> Option<usize> {
    let dir = dir.join("checkpoint");
    let epoch = |name: &str| {
        name.strip_prefix("model-")?
            .strip_suffix(".bpk")?
            .parse()
            .ok()
    };
    let mut epochs: Vec<usize> = fs::read_dir(&dir)
        .ok()?
        .flatten()
        .filter_map(|entry| epoch(&entry.file_name().to_string_lossy()))
        .collect();
    epochs.sort_unstable();
    epochs.into_iter().rev().find(|epoch| {
        let path = |name: &str| dir.join(format!("{name}-{epoch}.bpk"));
        ModuleRecord::load(path("model")).is_ok()
            && OptimizerRecord::load(path("optim")).is_ok()
            && LrSchedulerRecord::load(path("scheduler")).is_ok()
    })
}

/// Removes an earlier run's checkpoints and logs: its later epochs would be taken for this run's.
///
/// # Errors
///
/// [`Error::Io`] if one cannot be removed.
pub fn clear(dir: &Path) -> Result<(), Error> {
    for name in ["checkpoint", "train", "valid"] {
        let path = dir.join(name);
        if path.exists() {
            fs::remove_dir_all(&path).map_err(Error::io(&path))?;
        }
    }
    Ok(())
}
