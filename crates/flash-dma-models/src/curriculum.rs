//! A curriculum for training: short texts and wide windows first.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Tokens of the shortest texts.
const SHORTEST: usize = 64;

/// A share of a training's steps, the first ones, that are easier, divided evenly into stages. The share is from 0
/// (no step) to below 1.
///
/// In a long text many facts compete for every question, and a model may learn nothing for thousands of steps, even
/// with dense attention. In a short one it soon learns to look facts up, and then continues with longer ones.
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
    /// True if no step is easier.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.0 == 0.0
    }

    /// Divisor, a power of two, of the length of a step's texts (steps count from 0). Their length begins at 64 tokens,
    /// or the smallest larger one that this can give, and doubles with each stage.
    ///
    /// Batches of any loader already contain such texts: a reshape cuts `[batch, tokens]`, and `data::Batch::cut`
    /// also cuts its documents.
    #[must_use]
    pub fn divisor(self, tokens: usize, step: usize, steps: usize) -> usize {
        let stages = (tokens / SHORTEST).max(1).ilog2();
        let stages = stages.min(tokens.max(1).trailing_zeros());
        let stage = self.stage(stages, step, steps);
        stage.map_or(1, |stage| 1 << (stages - stage))
    }

    /// Stage of a step, both counted from 0; `None` after the last stage.
    #[must_use]
    pub fn stage(self, stages: u32, step: usize, steps: usize) -> Option<u32> {
        let done = self.done(step, steps)?;
        (stages > 0).then_some((done * f64::from(stages)) as u32)
    }

    /// Window of a step, counted from 0, of a layer that ends with `window` of `tokens`: half of the tokens at first,
    /// then half of that, and so on. A key that no head keeps teaches nothing, so with few keys a model that must
    /// learn to copy from far away hardly begins to.
    #[must_use]
    pub fn window(self, window: usize, tokens: usize, step: usize, steps: usize) -> usize {
        let widest = (tokens / 2).max(window);
        let stages = (tokens / window.max(1)).max(1).ilog2().saturating_sub(1);
        let stage = self.stage(stages, step, steps);
        stage.map_or(window, |stage| (widest >> stage).max(window))
    }

    /// Fraction of the share that is done before a step, from 0 to below 1; `None` after it.
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
