//! Medians and their spread.

use serde::{Deserialize, Serialize};

/// Median and quartiles of a sample, in milliseconds.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Millis {
    /// The middle value.
    pub median: f64,
    /// The lower quartile.
    pub q1: f64,
    /// The upper quartile.
    pub q3: f64,
    /// Number of values.
    pub runs: usize,
}

impl Millis {
    /// The statistics of a sample of milliseconds. Panics if the sample is empty.
    #[must_use]
    pub fn of(mut sample: Vec<f64>) -> Self {
        assert!(!sample.is_empty(), "no measurement");
        sample.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let place = part * (sample.len() - 1) as f64;
            let (low, high) = (place.floor() as usize, place.ceil() as usize);
            sample[low] + (sample[high] - sample[low]) * place.fract()
        };
        Self {
            median: at(0.5),
            q1: at(0.25),
            q3: at(0.75),
            runs: sample.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_interpolate_between_values() {
        let m = Millis::of(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!((m.median, m.q1, m.q3, m.runs), (2.5, 1.75, 3.25, 4));
        assert_eq!(Millis::of(vec![7.0]).median, 7.0);
    }
}
