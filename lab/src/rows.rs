//! Rows of results, one per run, and the rates they recommend. A file of rows is a JSON array, a row per line.

use crate::Result;
use crate::arm::Arm;
use crate::settings::{Settings, Task};
use crate::train::Outcome;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// A run: everything needed for a table and to repeat it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Commit of the build.
    pub commit: String,
    /// Description of the machine.
    pub machine: String,
    /// Settings that determine the outcome.
    #[serde(flatten)]
    pub settings: Settings,
    /// Recall only: number of facts, and how many can be kept.
    #[serde(flatten)]
    pub places: Option<Places>,
    /// The outcome.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Facts of a text, and the room for them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Places {
    /// Pairs per text.
    pub pairs: usize,
    /// Window of a kv head, per pair.
    pub window_per_pair: f64,
    /// Share of all facts that the heads of a layer can keep together, at most 1. An attention layer that answers by
    /// looking at facts cannot do better; but several layers keep keys of their own, and a kept key may have gathered
    /// what it saw in an earlier layer.
    pub cap: f64,
    /// [`cap`](Self::cap) of all layers.
    pub cap_of_all_layers: f64,
}

impl Places {
    /// The places that the layers of a run have for keys.
    pub fn of(settings: &Settings) -> Self {
        let pairs = settings.recall().pairs;
        let window = settings.window.unwrap_or(settings.tokens);
        let cap = |layers| {
            let places = layers * settings.sizes.kv_heads * window;
            (places as f64 / pairs as f64).min(1.0)
        };
        Self {
            pairs,
            window_per_pair: window as f64 / pairs as f64,
            cap: cap(1),
            cap_of_all_layers: cap(settings.sizes.layers),
        }
    }
}

impl Row {
    /// The row of a run.
    pub fn new(settings: Settings, outcome: Outcome, commit: &str, machine: &str) -> Self {
        Self {
            commit: commit.into(),
            machine: machine.into(),
            places: (settings.task == Task::Recall).then(|| Places::of(&settings)),
            settings,
            outcome,
        }
    }
}

/// A file of rows held by one call.
#[derive(Debug)]
pub struct Held {
    path: PathBuf,
    _file: File,
}

/// Holds a file of rows for one call. Two calls would each write back what they read at their start. The lock is on a
/// file next to it, because the file of rows is replaced; it ends with the process, however that ends.
pub fn hold(path: &Path) -> Result<Held> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock = PathBuf::from(name);
    let failed = |e| format!("{}: {e}", lock.display());
    let file = File::create(&lock).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(Held {
            path: lock,
            _file: file,
        }),
        Err(TryLockError::WouldBlock) => {
            Err(format!("{}: another call adds rows to it", path.display()).into())
        }
        Err(TryLockError::Error(e)) => Err(failed(e).into()),
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // A file that stays does no harm.
        let _ = fs::remove_file(&self.path);
    }
}

/// The rows of a file, none if it does not exist.
pub fn read(path: &Path) -> Result<Vec<Row>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?)
}

/// Writes a file of rows. Replaces an existing one when the new one is complete.
pub fn write(path: &Path, rows: &[Row]) -> Result<()> {
    let line = |row| serde_json::to_string(row).expect("a row's keys are strings");
    let lines: Vec<String> = rows.iter().map(line).collect();
    let text = format!("[\n{}\n]\n", lines.join(",\n"));
    let new = path.with_extension("new");
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    Ok(written.map_err(|e| format!("{}: {e}", path.display()))?)
}

/// Rates count as equal if their means differ by no more.
const ALIKE: f64 = 0.002;

/// The rate with which an arm answered best on average over the seeds of a sweep; among equal ones the lowest: the
/// fastest on one seed may fail on another. `None` if the sweep has no row of the arm.
pub fn best_rate(sweep: &[Row], arm: Arm) -> Option<f64> {
    let of_arm = sweep.iter().filter(|row| row.settings.arm == arm);
    let answers =
        of_arm.filter_map(|row| Some((row.settings.rate, row.outcome.evaluation.accuracy?)));
    let answers: Vec<(f64, f64)> = answers.collect();
    let mut rates: Vec<f64> = answers.iter().map(|&(rate, _)| rate).collect();
    rates.sort_by(f64::total_cmp);
    rates.dedup();
    let answered = |rate: f64| {
        let of_rate = answers.iter().filter(|of| of.0 == rate);
        let (sum, count) = of_rate.fold((0.0, 0.0), |(sum, n), of| (sum + of.1, n + 1.0));
        sum / count
    };
    let best = (rates.iter().map(|&rate| answered(rate))).fold(f64::NEG_INFINITY, f64::max);
    let good = |&rate: &f64| answered(rate) >= best - ALIKE;
    rates.into_iter().find(good)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Size;
    use crate::train::{Evaluation, Stop, Training};

    fn row(settings: Settings, accuracy: Option<f64>) -> Row {
        let outcome = Outcome {
            training: Training {
                parameters: 1,
                steps_done: 10,
                stopped: Stop::Steps,
                step_milliseconds: None,
                reserved_bytes: None,
                curve: Vec::new(),
            },
            evaluation: Evaluation {
                accuracy,
                by_layer: vec![None],
                ..Evaluation::default()
            },
            seconds: 1.0,
        };
        Row::new(settings, outcome, "0", "none")
    }

    fn settings(task: Task, arm: Arm) -> Settings {
        Settings::of(task, arm, Size::Smallest)
    }

    #[test]
    fn the_mean_over_seeds_decides_and_of_rates_alike_the_lowest_is_taken() {
        let answered = |(rate, seed, accuracy)| {
            let settings = Settings {
                rate,
                seed,
                ..settings(Task::Recall, Arm::Ours)
            };
            row(settings, Some(accuracy))
        };
        let mut sweep = vec![answered((1e-3, 0, 1.0)), answered((1e-3, 1, 0.2))];
        sweep.extend([(4e-3, 0, 0.7), (4e-3, 1, 0.7)].map(answered));
        assert_eq!(best_rate(&sweep, Arm::Ours), Some(4e-3));
        sweep.extend([(8e-3, 0, 0.701), (8e-3, 1, 0.702)].map(answered));
        assert_eq!(best_rate(&sweep, Arm::Ours), Some(4e-3));
        sweep.extend([(9e-3, 0, 0.71), (9e-3, 1, 0.71)].map(answered));
        assert_eq!(best_rate(&sweep, Arm::Ours), Some(9e-3));
        assert_eq!(best_rate(&sweep, Arm::Dense), None);
    }

    #[test]
    fn rows_are_read_as_they_were_written_by_one_call_at_a_time() {
        let path = std::env::temp_dir().join(format!("lab-rows-{}.json", std::process::id()));
        let held = hold(&path).unwrap();
        let error = hold(&path).unwrap_err().to_string();
        assert!(error.ends_with("another call adds rows to it"), "{error}");
        let rows = vec![
            row(settings(Task::Recall, Arm::Frozen), Some(0.25)),
            row(settings(Task::Needles, Arm::Sliding), None),
        ];
        write(&path, &rows).unwrap();
        assert_eq!(read(&path).unwrap(), rows);
        fs::remove_file(&path).unwrap();
        drop(held);
        drop(hold(&path).unwrap());
        assert!(!fs::exists(path.with_extension("json.lock")).unwrap());
    }
}
