//! A part of a training that is made of stages of equal length.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The share of a training's steps, its first ones, that stages divide evenly: from 0 to below 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Share(f64);

impl Share {
    /// Whether it is no step.
    pub fn is_none(&self) -> bool {
        self.0 == 0.0
    }

    /// The stage, counted from 0, of a step, counted from 0, of all the steps; `None` behind the last stage.
    pub fn stage(self, stages: u32, step: usize, steps: usize) -> Option<u32> {
        let done = self.done(step, steps)?;
        (stages > 0).then_some((done * f64::from(stages)) as u32)
    }

    /// How much of the share is done, from 0 to below 1, before a step, counted from 0, of all the steps; `None` behind it.
    pub fn done(self, step: usize, steps: usize) -> Option<f64> {
        let done = step as f64 / (self.0 * steps as f64);
        (!self.is_none() && done < 1.0).then_some(done)
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(share) if (0.0..1.0).contains(&share) => Ok(Self(share)),
            _ => Err(format!("`{text}` is no share from 0 to below 1")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_divide_the_share_evenly() {
        let stages = |share: &str, stages| {
            let share: Share = share.parse().unwrap();
            [0, 24, 25, 49, 50, 99].map(|step| share.stage(stages, step, 100))
        };
        let [first, second] = [Some(0), Some(1)];
        assert_eq!(stages("0.5", 2), [first, first, second, second, None, None]);
        assert_eq!(stages("0.5", 0), [None; 6]);
        assert_eq!(stages("0", 2), [None; 6]);
    }

    #[test]
    fn a_share_is_from_0_to_below_1() {
        for text in ["1", "-0.1", "NaN", "half"] {
            assert!(text.parse::<Share>().is_err(), "{text}");
        }
    }
}
