//! Attention to the last keys: position by position, by definition.

use crate::attention::{Forward, Inputs};
use crate::naive::{self, NaiveForward};
use crate::rows::{self, Pairs};

/// The last keys of every row, but those of a score of −∞.
struct LastKeys<'a> {
    inputs: &'a Inputs,
    window: usize,
}

impl Pairs for LastKeys<'_> {
    fn row(&self, b: usize, h: usize, i: usize, keys: &mut Vec<(usize, f64)>) {
        let p = &self.inputs.problem;
        keys.clear();
        let Ok(position) = usize::try_from(p.position(i)) else {
            return;
        };
        let head = b * p.kv_heads + h / p.group();
        let scores = self.inputs.scores.as_ref();
        let score = |key| scores.map_or(0.0, |scores| scores[head * p.k_len + key]);
        let first = (position + 1).saturating_sub(self.window);
        let last = (first..=position).map(|key| (key, score(key)));
        keys.extend(last.filter(|&(_, score)| score != f64::NEG_INFINITY));
    }
}

impl Inputs {
    /// The output and the LSE if every position attends to the last `window` keys that it sees, its own included, but
    /// to none of a score of −∞; scores are added to the logits if there are any.
    ///
    /// # Panics
    ///
    /// If a tensor does not have the problem's shape.
    #[must_use]
    pub fn forward_last(&self, window: usize) -> Forward {
        let inputs = self;
        let (out, lse) = rows::forward(&self.tensors(), &LastKeys { inputs, window });
        Forward { out, lse }
    }

    /// As [`Inputs::forward_last`], by the same-dtype naive implementation.
    ///
    /// # Panics
    ///
    /// As it.
    #[must_use]
    pub fn naive_forward_last(&self, window: usize) -> NaiveForward {
        let inputs = self;
        naive::forward(&self.tensors(), &LastKeys { inputs, window })
    }
}
