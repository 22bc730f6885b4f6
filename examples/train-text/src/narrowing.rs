//! A window that is wide when a training begins.
//!
//! A key that no head keeps teaches nothing, so a model that must learn to copy what it is told a long way off hardly
//! begins to with a small window. It does with half of the keys, and goes on with fewer.

use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// The share of a training's steps in which the window is wider than it is in the end: half of the keys at first, then
/// half of that, and so on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Narrowing(f64);

impl Narrowing {
    /// Whether the window is the same in all steps.
    pub fn is_none(&self) -> bool {
        self.0 == 0.0
    }

    /// The window of a step, counted from 0, of all the steps, of a layer that ends with a window of these tokens.
    pub fn window(self, window: usize, tokens: usize, step: usize, steps: usize) -> usize {
        let stages = (tokens / window.max(1)).max(1).ilog2().saturating_sub(1);
        if self.is_none() || stages == 0 {
            return window;
        }
        let stage = step as f64 / (self.0 * steps as f64) * f64::from(stages);
        match stage < f64::from(stages) {
            true => (tokens >> (1 + stage as u32)).max(window),
            false => window,
        }
    }
}

impl FromStr for Narrowing {
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
    fn a_window_narrows_by_halves_and_then_stays() {
        let windows = |narrowing: &str, window| {
            let narrowing: Narrowing = narrowing.parse().unwrap();
            [0, 24, 25, 49, 50, 99].map(|step| narrowing.window(window, 256, step, 100))
        };
        assert_eq!(windows("0.5", 32), [128, 128, 64, 64, 32, 32]);
        assert_eq!(windows("0.5", 40), [128, 128, 128, 128, 40, 40]);
        assert_eq!(windows("0", 32), [32; 6]);
        for window in [100, 128, 256, 300] {
            assert_eq!(windows("0.5", window), [window; 6]);
        }
    }

    #[test]
    fn a_share_is_from_0_to_below_1() {
        for text in ["1", "-0.1", "NaN", "half"] {
            assert!(text.parse::<Narrowing>().is_err(), "{text}");
        }
    }
}
