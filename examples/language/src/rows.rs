//! One row per run, and what rows say of others.

use crate::answers::Answers;
use crate::compare::Difference;
use crate::losses::Losses;
use crate::selection::LayerStatistics;
use crate::settings::Settings;
use crate::train::Training;
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
    /// Everything, compilation and evaluations included.
    pub seconds: f64,
    /// The outcome.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// A finished run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The training.
    #[serde(flatten)]
    pub training: Training,
    /// What each layer selects on a text of the training length; `None` of a layer that attends to all keys.
    pub by_layer: Vec<Option<LayerStatistics>>,
    /// Of text: the losses at the training length, and at four times it, on the same bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub losses: Vec<Losses>,
    /// Of text: the losses at the training length with other windows than the training's, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub losses_by_window: Vec<WindowLosses>,
    /// Of needles: the answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answers: Option<Answers>,
}

/// The losses with another window than that of the training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WindowLosses {
    /// Keys per query and kv head.
    pub window: usize,
    /// The losses.
    #[serde(flatten)]
    pub losses: Losses,
}

/// The row of other settings that differ in the arm alone.
pub fn peer<'a>(rows: &'a [Row], run: &Settings, arm: crate::arm::Arm) -> Option<&'a Row> {
    let is_peer = |row: &&Row| row.settings.arm == arm && row.settings.differs_in_arm(run);
    rows.iter().find(is_peer)
}

/// At each length, the difference of a row's losses to another one's.
pub fn differences(row: &Row, other: &Row) -> Vec<(usize, Option<Difference>)> {
    let pairs = row.outcome.losses.iter().zip(&other.outcome.losses);
    pairs
        .map(|(a, b)| (a.length, Difference::of(&a.windows, &b.windows)))
        .collect()
}

/// The seconds that a run may take, by the mean over rows of the same task, device, element type and sizes: those of
/// the same arm, else all. A row with more or fewer steps or texts counts in proportion. `None` without such a row.
pub fn expected_seconds(rows: &[Row], run: &Settings) -> Option<f64> {
    let alike = |row: &&Row| {
        let of = |s: &Settings| (s.task, s.device, s.dtype, s.tokens, s.sizes);
        of(&row.settings) == of(run)
    };
    let work = |of: &Settings| (of.steps * of.batch) as f64;
    let mean = |rows: &mut dyn Iterator<Item = &Row>| {
        let (sum, count) = rows.fold((0.0, 0.0), |(sum, count), row| {
            (
                sum + row.seconds * work(run) / work(&row.settings),
                count + 1.0,
            )
        });
        (count > 0.0).then(|| sum / count)
    };
    let rows = || rows.iter().filter(alike);
    mean(&mut rows().filter(|row| row.settings.arm == run.arm)).or_else(|| mean(&mut rows()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arm::Arm;
    use crate::settings::{Size, Task};

    fn row(arm: Arm, seconds: f64, windows: [f64; 2]) -> Row {
        let settings = Settings {
            arm,
            window: (arm != Arm::Dense).then_some(16),
            ..Task::Text.settings(Size::Smallest)
        };
        let losses = Losses {
            length: 128,
            loss: windows.iter().sum::<f64>() / 2.0,
            bins: Vec::new(),
            windows: windows.to_vec(),
        };
        Row {
            commit: "0".into(),
            machine: "none".into(),
            settings,
            seconds,
            outcome: Outcome {
                training: Training {
                    parameters: 1,
                    step_milliseconds: None,
                    reserved_bytes: None,
                    curve: Vec::new(),
                },
                by_layer: vec![None],
                losses: vec![losses],
                losses_by_window: Vec::new(),
                answers: None,
            },
        }
    }

    #[test]
    fn rows_are_read_as_they_were_written() {
        let path = std::env::temp_dir().join(format!("language-rows-{}.json", std::process::id()));
        let rows = vec![
            row(Arm::Dense, 1.0, [1.0, 2.0]),
            row(Arm::Ours, 2.5, [0.1, 0.3]),
        ];
        train_text::rows::write(&path, &rows).unwrap();
        assert_eq!(train_text::rows::read::<Row>(&path).unwrap(), rows);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_row_is_compared_with_that_of_the_other_arm() {
        let rows = [
            row(Arm::Dense, 1.0, [1.0, 2.0]),
            row(Arm::Ours, 1.0, [1.25, 2.25]),
        ];
        let dense = peer(&rows, &rows[1].settings, Arm::Dense).unwrap();
        assert_eq!(dense, &rows[0]);
        let [(length, Some(difference))] = differences(&rows[1], dense)[..] else {
            panic!("one length");
        };
        assert_eq!((length, difference.mean), (128, 0.25));
        let other = Settings {
            seed: 9,
            ..rows[1].settings.clone()
        };
        assert_eq!(peer(&rows, &other, Arm::Dense), None);
    }

    #[test]
    fn rows_say_how_long_a_run_takes() {
        let rows = [
            row(Arm::Dense, 10.0, [1.0; 2]),
            row(Arm::Ours, 20.0, [1.0; 2]),
        ];
        let run = |arm| Settings {
            steps: 2 * rows[0].settings.steps,
            arm,
            ..rows[0].settings.clone()
        };
        assert_eq!(expected_seconds(&rows, &run(Arm::Ours)), Some(40.0));
        assert_eq!(expected_seconds(&rows, &run(Arm::Sliding)), Some(30.0));
        assert_eq!(expected_seconds(&[], &run(Arm::Ours)), None);
    }
}
