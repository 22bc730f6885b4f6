//! Options of a command that are more than a number.

use crate::Result;
use burn_flash_dma::nn::RoundRobin;
use burn_flash_dma::{LeaveOneOut, RankSoftmax};
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Consecutive seeds: a number, or a range with both of its ends, as in `3..5`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seeds(RangeInclusive<u64>);

impl Seeds {
    /// Each of them.
    pub fn each(&self) -> RangeInclusive<u64> {
        self.0.clone()
    }
}

impl FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is no seed"));
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        let (first, last) = (number(first)?, number(last)?);
        match first <= last {
            true => Ok(Self(first..=last)),
            false => Err(format!("{first} is behind {last}")),
        }
    }
}

/// The penalty of heads that take turns, where none is given: more than any score of a normalised token.
const STRICT: f64 = 1000.0;

/// Reads `RUN` or `RUN:PENALTY`.
pub fn round_robin(text: &str) -> Result<RoundRobin, String> {
    let (run, penalty) = match text.split_once(':') {
        Some((run, penalty)) => (run, penalty.parse()),
        None => (text, Ok(STRICT)),
    };
    match (run.parse(), penalty) {
        (Ok(run @ 1..=0xffff), Ok(penalty)) if is_factor(penalty) => {
            Ok(RoundRobin::new(run, penalty))
        }
        _ => Err(format!(
            "`{text}` is not a run of 1 to 65535 tokens, or one and a penalty of at least 0, as 2:1.5"
        )),
    }
}

/// What kept keys learn, by its weight besides them.
pub fn leave_one_out(besides: &str) -> Result<LeaveOneOut, String> {
    LeaveOneOut::new(number(besides)?).map_err(|error| error.to_string())
}

/// What the ranks of a head compete for, by the factor on them.
pub fn rank_softmax(inverse_temperature: &str) -> Result<RankSoftmax, String> {
    RankSoftmax::new(number(inverse_temperature)?).map_err(|error| error.to_string())
}

fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "not a number".to_owned())
}

/// Whether a number is at least 0 and, as f32, finite: the layers compute with it in f32.
pub fn is_factor(number: f64) -> bool {
    (0.0..f32::INFINITY).contains(&(number as f32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_seeds_have_both_of_their_ends() {
        let each = |text: &str| Some(text.parse::<Seeds>().ok()?.each().collect::<Vec<_>>());
        assert_eq!(each("7"), Some(vec![7]));
        assert_eq!(each("1..3"), Some(vec![1, 2, 3]));
        for wrong in ["3..1", "1..", "a"] {
            assert_eq!(each(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_run_and_a_penalty_are_read() {
        assert_eq!(round_robin("2"), Ok(RoundRobin::new(2, STRICT)));
        assert_eq!(round_robin("16:1.5"), Ok(RoundRobin::new(16, 1.5)));
        for wrong in [
            "", "0", "-1", "65536", "a", "2:a", "2:-1", "2:NaN", "2:1e39", ":1",
        ] {
            assert!(round_robin(wrong).is_err(), "{wrong}");
        }
    }
}
