//! The losses of a run, read back from burn-train's logs: those of a resumed run are all there.

use std::fs;
use std::path::Path;

use burn::train::metric::NumericEntry;
use serde::Serialize;

use crate::cli::Settings;
use crate::error::Error;
use crate::train::LOSS;

/// Losses in nats a byte, and times, of one run.
#[derive(Debug, Clone, Serialize)]
pub struct Curve {
    /// `sparse` or `dense`.
    pub label: String,
    /// Keys a query may attend to.
    pub window: usize,
    /// Trained numbers in the model.
    pub parameters: usize,
    /// (step, loss of its batch).
    pub train: Vec<(usize, f64)>,
    /// (steps done, mean loss over the validation windows).
    pub valid: Vec<(usize, f64)>,
    /// How long it took.
    pub timings: Timings,
}

/// Wall-clock times of this session: a resumed run's earlier sessions are not in them.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Timings {
    /// Training epochs.
    pub train_seconds: f64,
    /// Validation.
    pub valid_seconds: f64,
    /// The first training epoch of the session, compilation of kernels included.
    pub first_epoch_seconds: Option<f64>,
    /// A training step, the mean of the session's later epochs.
    pub step_milliseconds: Option<f64>,
}

impl Curve {
    /// Reads the logs in `dir`.
    ///
    /// # Errors
    ///
    /// [`Error::Unusable`] if a line is no number.
    pub fn read(
        dir: &Path,
        label: &str,
        settings: &Settings,
        parameters: usize,
        timings: Timings,
    ) -> Result<Self, Error> {
        let steps = settings.steps_an_epoch();
        let (mut train, mut valid) = (Vec::new(), Vec::new());
        for epoch in 1..=settings.evaluations {
            let before = (epoch - 1) * steps;
            let values = |log: Vec<NumericEntry>, last: bool| {
                let wanted =
                    move |entry: &NumericEntry| matches!(entry, NumericEntry::Final(_)) == last;
                log.into_iter().filter(wanted).map(|entry| entry.current())
            };
            let losses = values(read_log(dir, "train", epoch)?, false);
            train.extend(losses.enumerate().map(|(i, loss)| (before + i + 1, loss)));
            let losses = values(read_log(dir, "valid", epoch)?, true);
            valid.extend(losses.map(|loss| (before + steps, loss)));
        }
        Ok(Self {
            label: label.into(),
            window: settings.window,
            parameters,
            train,
            valid,
            timings,
        })
    }

    /// The last validation loss, if the run got that far.
    pub fn final_valid(&self) -> Option<f64> {
        self.valid.last().map(|&(_, loss)| loss)
    }
}

/// The entries of one epoch; none if it has not been reached.
fn read_log(dir: &Path, split: &str, epoch: usize) -> Result<Vec<NumericEntry>, Error> {
    let path = dir
        .join(split)
        .join(format!("epoch-{epoch}"))
        .join(format!("{LOSS}.log"));
    let Ok(log) = fs::read_to_string(&path) else {
        return Ok(Vec::new());
    };
    log.lines()
        .map(|line| {
            NumericEntry::deserialize(line).map_err(|reason| Error::Unusable {
                path: path.clone(),
                reason,
            })
        })
        .collect()
}
