//! A window that is wide when a training begins.
//!
//! A key that no head keeps teaches nothing, so a model that must learn to copy what it is told a long way off hardly
//! begins to with a small window. It does with half of the keys, and goes on with fewer.

use flash_dma_models::Curriculum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// In which of its first steps a training has a wider window, which is half of the keys at first.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Narrowing {
    /// In this share of the steps, in stages: half of the keys, then half of that, and so on.
    Halving(Curriculum),
    /// In this share of the steps, a little narrower with every step, by the same factor.
    Gradual {
        /// The share.
        gradual: Curriculum,
    },
}

impl Narrowing {
    /// The window of a step, counted from 0, of all the steps, of a layer that ends with a window of these tokens.
    pub fn window(self, window: usize, tokens: usize, step: usize, steps: usize) -> usize {
        let widest = (tokens / 2).max(window);
        match self {
            Self::Halving(share) => {
                let stages = (tokens / window.max(1)).max(1).ilog2().saturating_sub(1);
                let stage = share.stage(stages, step, steps);
                stage.map_or(window, |stage| (widest >> stage).max(window))
            }
            Self::Gradual { gradual } => {
                let factor = window as f64 / widest.max(1) as f64;
                let narrowed = |done| (widest as f64 * factor.powf(done)).round() as usize;
                gradual.done(step, steps).map_or(window, narrowed)
            }
        }
    }
}

impl Default for Narrowing {
    fn default() -> Self {
        Self::Halving(Curriculum::default())
    }
}

/// Before the share where windows do not narrow by halves.
const GRADUAL: &str = "gradual:";

impl FromStr for Narrowing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix(GRADUAL) {
            None => text.parse().map(Self::Halving),
            Some(share) => (share.parse()).map(|gradual| Self::Gradual { gradual }),
        }
    }
}

impl fmt::Display for Narrowing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Halving(share) => write!(f, "{share}"),
            Self::Gradual { gradual } => write!(f, "{GRADUAL}{gradual}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(narrowing: &str, window: usize) -> [usize; 6] {
        let narrowing: Narrowing = narrowing.parse().unwrap();
        [0, 24, 25, 49, 50, 99].map(|step| narrowing.window(window, 256, step, 100))
    }

    #[test]
    fn a_window_narrows_by_halves_and_then_stays() {
        assert_eq!(windows("0.5", 32), [128, 128, 64, 64, 32, 32]);
        assert_eq!(windows("0.5", 40), [128, 128, 128, 128, 40, 40]);
        assert_eq!(windows("0", 32), [32; 6]);
        for window in [100, 128, 256, 300] {
            assert_eq!(windows("0.5", window), [window; 6]);
        }
    }

    #[test]
    fn a_window_narrows_by_a_factor_per_step_and_then_stays() {
        assert_eq!(windows("gradual:0.5", 32), [128, 66, 64, 33, 32, 32]);
        assert_eq!(windows("gradual:0", 32), [32; 6]);
        for window in [128, 256, 300] {
            assert_eq!(windows("gradual:0.5", window), [window; 6]);
        }
    }

    #[test]
    fn what_is_written_in_rows_and_options_is_read_again() {
        for text in ["0", "0.5", "gradual:0.25"] {
            let narrowing: Narrowing = text.parse().unwrap();
            assert_eq!(narrowing.to_string(), text);
            let row = serde_json::to_string(&narrowing).unwrap();
            assert_eq!(serde_json::from_str::<Narrowing>(&row).unwrap(), narrowing);
        }
        assert!("gradual:1".parse::<Narrowing>().is_err());
    }
}
