//! The learning rate of each arm, from the rows of a sweep over a list of rates.

use crate::arm::Arm;
use crate::rows::Row;

/// Rates whose means differ by no more answer alike.
const ALIKE: f64 = 0.002;

/// The rate with which an arm answered best in the mean over the seeds of the sweep; of those that answer alike the
/// lowest: the fastest on one seed may fail on another. `None` if the sweep has no row of the arm.
pub fn best(sweep: &[Row], arm: Arm) -> Option<f64> {
    let of_arm: Vec<&Row> = sweep.iter().filter(|row| row.settings.arm == arm).collect();
    let mut rates: Vec<f64> = of_arm.iter().map(|row| row.settings.rate).collect();
    rates.sort_by(f64::total_cmp);
    rates.dedup();
    let answered = |rate: f64| {
        let rows = of_arm.iter().filter(|row| row.settings.rate == rate);
        let (sum, count) = rows.fold((0.0, 0.0), |(sum, n), row| {
            (sum + row.outcome.last.accuracy, n + 1.0)
        });
        sum / count
    };
    let best = (rates.iter().map(|&rate| answered(rate))).fold(f64::NEG_INFINITY, f64::max);
    rates
        .into_iter()
        .find(|&rate| answered(rate) >= best - ALIKE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::Evaluation;
    use crate::settings::{Settings, Size};
    use crate::train::{Outcome, Stop};
    use train_text::rows;

    fn row(rate: f64, seed: u64, accuracy: f64, steps_done: usize) -> Row {
        let settings = Settings {
            rate,
            seed,
            ..Settings::of(Arm::Ours, Size::Smallest)
        };
        let outcome = Outcome {
            parameters: 1,
            last: Evaluation {
                accuracy,
                kept: 1.0,
                by_layer: Vec::new(),
            },
            steps_done,
            stopped: Stop::Steps,
            seconds: 1.0,
            step_milliseconds: None,
            curve: Vec::new(),
        };
        Row::new(settings, outcome, "0", "none")
    }

    #[test]
    fn the_mean_over_seeds_decides_and_of_rates_alike_the_lowest_is_taken() {
        let mut sweep = vec![
            row(1e-3, 0, 1.0, 500),
            row(1e-3, 1, 0.2, 500),
            row(4e-3, 0, 0.7, 500),
            row(4e-3, 1, 0.7, 500),
        ];
        assert_eq!(best(&sweep, Arm::Ours), Some(4e-3));
        sweep.extend([row(8e-3, 0, 0.701, 300), row(8e-3, 1, 0.702, 300)]);
        assert_eq!(best(&sweep, Arm::Ours), Some(4e-3));
        sweep.extend([row(9e-3, 0, 0.71, 400), row(9e-3, 1, 0.71, 400)]);
        assert_eq!(best(&sweep, Arm::Ours), Some(9e-3));
        assert_eq!(best(&sweep, Arm::Dense), None);
    }

    #[test]
    fn rows_are_read_as_they_were_written() {
        let path = std::env::temp_dir().join(format!("recall-rows-{}.json", std::process::id()));
        let rows = vec![row(1e-3, 0, 1.0, 500), row(2e-3, 7, 0.25, 10)];
        rows::write(&path, &rows).unwrap();
        assert_eq!(rows::read::<Row>(&path).unwrap(), rows);
        std::fs::remove_file(path).unwrap();
    }
}
