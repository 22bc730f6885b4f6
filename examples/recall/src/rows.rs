//! One row per run, in a file of [`train_text::rows`].

use crate::settings::Settings;
use crate::train::Outcome;
use serde::{Deserialize, Serialize};

/// A run: everything that a table needs, and everything to repeat it with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The commit that has been built.
    pub commit: String,
    /// The machine, in words.
    pub machine: String,
    /// What decides the outcome.
    #[serde(flatten)]
    pub settings: Settings,
    /// Pairs per text.
    pub pairs: usize,
    /// [`Settings::window_per_pair`].
    pub window_per_pair: f64,
    /// [`Settings::cap`].
    pub cap: f64,
    /// [`Settings::cap_of_all_layers`].
    pub cap_of_all_layers: f64,
    /// The outcome.
    #[serde(flatten)]
    pub outcome: Outcome,
}

impl Row {
    /// The row of a run.
    pub fn new(settings: Settings, outcome: Outcome, commit: &str, machine: &str) -> Self {
        Self {
            commit: commit.into(),
            machine: machine.into(),
            pairs: settings.task().pairs,
            window_per_pair: settings.window_per_pair(),
            cap: settings.cap(),
            cap_of_all_layers: settings.cap_of_all_layers(),
            settings,
            outcome,
        }
    }
}
