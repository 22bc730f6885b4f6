//! How long a run may take, by the rows of others.

use crate::rows::Row;
use crate::settings::Settings;

/// The seconds of a run, by the mean over rows of the same device: those of the same arm and length, else of the same
/// length, else all. A row with more or fewer steps, texts or tokens counts in proportion, which is too much where the
/// device waits for the host. `None` without a row of the device.
pub fn seconds(rows: &[Row], run: &Settings) -> Option<f64> {
    let of_device =
        |row: &&Row| row.settings.device == run.device && row.settings.dtype == run.dtype;
    let same_length = |row: &&Row| row.settings.tokens == run.tokens;
    let same_arm = |row: &&Row| row.settings.arm == run.arm;
    let rows = || rows.iter().filter(of_device);
    let work = |of: &Settings| (of.steps * of.batch * of.tokens) as f64;
    let mean = |rows: &mut dyn Iterator<Item = &Row>| {
        let (sum, count) = rows.fold((0.0, 0.0), |(sum, count), row| {
            let seconds = row.outcome.seconds * work(run) / work(&row.settings);
            (sum + seconds, count + 1.0)
        });
        (count > 0.0).then(|| sum / count)
    };
    mean(&mut rows().filter(same_length).filter(same_arm))
        .or_else(|| mean(&mut rows().filter(same_length)))
        .or_else(|| mean(&mut rows()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arm::Arm;
    use crate::evaluate::Evaluation;
    use crate::settings::Size;
    use crate::train::{Outcome, Stop};

    fn settings(arm: Arm, tokens: usize) -> Settings {
        Settings {
            tokens,
            ..Settings::of(arm, Size::Smallest)
        }
    }

    fn row(arm: Arm, tokens: usize, seconds: f64) -> Row {
        let outcome = Outcome {
            parameters: 1,
            last: Evaluation {
                accuracy: 0.5,
                kept: 1.0,
                by_layer: Vec::new(),
            },
            steps_done: 10,
            stopped: Stop::Steps,
            seconds,
            step_milliseconds: None,
            curve: Vec::new(),
        };
        Row::new(settings(arm, tokens), outcome, "0", "none")
    }

    #[test]
    fn the_nearest_rows_count_in_proportion() {
        let rows = [
            row(Arm::Ours, 64, 10.0),
            row(Arm::Ours, 64, 20.0),
            row(Arm::Dense, 64, 30.0),
        ];
        let run = |arm, tokens| seconds(&rows, &settings(arm, tokens));
        assert_eq!(run(Arm::Ours, 64), Some(15.0));
        assert_eq!(run(Arm::Frozen, 64), Some(20.0));
        assert_eq!(run(Arm::Ours, 128), Some(40.0));
        let twice = Settings {
            steps: 600,
            ..settings(Arm::Dense, 64)
        };
        assert_eq!(seconds(&rows, &twice), Some(60.0));
        assert_eq!(seconds(&[], &twice), None);
    }
}
