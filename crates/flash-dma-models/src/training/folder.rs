//! The folder of a training by Burn's loop.

use crate::data::DataError;
use burn::optim::OptimizerRecord;
use burn::optim::lr_scheduler::LrSchedulerRecord;
use burn::store::ModuleRecord;
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};

/// Error of a training's folder. The text of each error explains its fields.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum FolderError {
    /// A file that cannot be read or written.
    #[error(transparent)]
    File(#[from] DataError),
    /// A training to resume that had other settings: the first one that differs.
    #[error("the training that stopped had {name} = {then}, not {now}: give it what it had")]
    OtherSetting {
        name: String,
        then: Box<Value>,
        now: Box<Value>,
    },
}

/// Folder of a training by Burn's `SupervisedTraining` with its default checkpointers: the settings, so that a training
/// resumes only as what it was, and the checkpoints.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// A folder, which need not exist.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Its path: the directory of Burn's training.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Prepares the folder for a new training with these settings, which are an object: removes checkpoints and logs of an
    /// earlier one, which would be mistaken for this one's.
    ///
    /// # Errors
    ///
    /// [`FolderError::File`].
    pub fn start_over(&self, settings: &Value) -> Result<(), FolderError> {
        for path in ["checkpoint", "train", "valid"].map(|name| self.path.join(name)) {
            if path.exists() {
                fs::remove_dir_all(&path).map_err(DataError::io(&path))?;
            }
        }
        fs::create_dir_all(&self.path).map_err(DataError::io(&self.path))?;
        let path = self.settings();
        fs::write(&path, format!("{settings:#}")).map_err(DataError::io(&path))?;
        Ok(())
    }

    /// Number of the last checkpoint, at most `epochs`, that is whole; `None` without one. A killed training may have
    /// written only a part of its last checkpoint.
    ///
    /// # Errors
    ///
    /// [`FolderError::OtherSetting`], and errors of the file of settings.
    pub fn last(&self, settings: &Value, epochs: usize) -> Result<Option<usize>, FolderError> {
        let path = self.settings();
        if !path.exists() {
            return Ok(None);
        }
        let saved = fs::read_to_string(&path).map_err(DataError::io(&path))?;
        let of_json = |error: serde_json::Error| DataError::io(&path)(error.into());
        let then: Value = serde_json::from_str(&saved).map_err(of_json)?;
        // Both from text: reading a number may change its last bit.
        let now: Map<String, Value> =
            serde_json::from_str(&format!("{settings:#}")).map_err(of_json)?;
        if let Some((name, now)) = now.into_iter().find(|(name, now)| then[name] != *now) {
            let (then, now) = (Box::new(then[&name].clone()), Box::new(now));
            return Err(FolderError::OtherSetting { name, then, now });
        }
        Ok((1..=epochs).rev().find(|&epoch| self.is_whole(epoch)))
    }

    fn settings(&self) -> PathBuf {
        self.path.join("settings.json")
    }

    /// True if model, optimiser and schedule of an epoch can all be loaded.
    fn is_whole(&self, epoch: usize) -> bool {
        let path = |name: &str| self.path.join(format!("checkpoint/{name}-{epoch}.bpk"));
        ModuleRecord::load(path("model")).is_ok()
            && OptimizerRecord::load(path("optim")).is_ok()
            && LrSchedulerRecord::load(path("scheduler")).is_ok()
    }
}
