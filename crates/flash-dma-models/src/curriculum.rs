//! Texts that are short, and windows that are wide, when a training begins.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Tokens of the shortest texts.
const SHORTEST: usize = 64;

/// A training that begins with what is easier, in a share of its steps: the first ones, which stages divide evenly. The
/// share is from 0, for no step, to below 1.
///
/// In a long text many facts compete for every question, and a model may learn nothing for thousands of steps, dense
/// attention included. In a short one it learns to look facts up soon, and goes on with longer ones.
///
/// ```
/// use flash_dma_models::Curriculum;
///
/// let curriculum: Curriculum = "0.5".parse().unwrap();
/// let divisors = [0, 30, 60].map(|step| curriculum.divisor(256, step, 100));
/// assert_eq!(divisors, [4, 2, 1]); // 64 tokens, 128, 256
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Curriculum(f64);

impl Curriculum {
    /// Whether no step is easier.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.0 == 0.0
    }

    /// How many times shorter the texts of a step are, counted from 0, of all the steps: 64 tokens at first (or the next
    /// more of which the length is a multiple by a power of two), then twice as many, and so on. A power of two.
    ///
    /// A batch of any loader holds such texts already: `[batch, tokens]` is cut by a reshape, and
    /// `data::Batch::cut` cuts its documents, too.
    #[must_use]
    pub fn divisor(self, tokens: usize, step: usize, steps: usize) -> usize {
        let stages = (tokens / SHORTEST).max(1).ilog2();
        let stages = stages.min(tokens.max(1).trailing_zeros());
        let stage = self.stage(stages, step, steps);
        stage.map_or(1, |stage| 1 << (stages - stage))
    }

    /// The stage, counted from 0, of a step, counted from 0, of all the steps; `None` behind the last stage.
    #[must_use]
    pub fn stage(self, stages: u32, step: usize, steps: usize) -> Option<u32> {
        let done = self.done(step, steps)?;
        (stages > 0).then_some((done * f64::from(stages)) as u32)
    }

    /// The window of a step, counted from 0, of all the steps, of a layer that ends with `window` of `tokens`: half of the
    /// tokens at first, then half of that, and so on. A key that no head keeps teaches nothing, so a model that must learn to
    /// copy what it is told a long way off hardly begins to with few keys.
    #[must_use]
    pub fn window(self, window: usize, tokens: usize, step: usize, steps: usize) -> usize {
        let widest = (tokens / 2).max(window);
        let stages = (tokens / window.max(1)).max(1).ilog2().saturating_sub(1);
        let stage = self.stage(stages, step, steps);
        stage.map_or(window, |stage| (widest >> stage).max(window))
    }

    /// How much of the share is done, from 0 to below 1, before a step, counted from 0, of all the steps; `None` behind it.
    fn done(self, step: usize, steps: usize) -> Option<f64> {
        let done = step as f64 / (self.0 * steps as f64);
        (!self.is_none() && done < 1.0).then_some(done)
    }
}

impl fmt::Display for Curriculum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Curriculum {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(share) if (0.0..1.0).contains(&share) => Ok(Self(share)),
            _ => Err(format!("`{text}` is no share from 0 to below 1")),
        }
    }
}
