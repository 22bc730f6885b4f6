//! Attention to the last keys: position by position, by definition.

use crate::attention::{Forward, Inputs};
use crate::naive::{self, NaiveForward};
use crate::rows::{self, Pairs, kv_keys};

/// The last keys of every row, but those of a score of −∞.
struct LastKeys<'a> {
    inputs: &'a Inputs,
    window: usize,
}

impl Pairs for LastKeys<'_> {
    fn row(&self, b: usize, h: usize, i: usize) -> Vec<(usize, f64)> {
        let p = &self.inputs.problem;
        let end = rows::visible(p, i).end;
        let scores = (self.inputs.scores.as_ref()).map(|scores| &scores[kv_keys(p, b, h)]);
        let score = |key: usize| scores.map_or(0.0, |scores| scores[key]);
        let last = (end.saturating_sub(self.window)..end).map(|key| (key, score(key)));
        last.filter(|&(_, score)| score != f64::NEG_INFINITY)
            .collect()
    }
}

impl Inputs {
    /// The output and the LSE if every position attends to the last `window` keys that it sees, its own included, but
    /// to none of a score of −∞; scores are added to the logits if there are any.
    #[must_use]
    pub fn forward_last(&self, window: usize) -> Forward {
        let inputs = self;
        rows::forward(&self.tensors(), &LastKeys { inputs, window })
    }

    /// As [`Inputs::forward_last`], by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_forward_last(&self, window: usize) -> NaiveForward {
        let inputs = self;
        naive::forward(&self.tensors(), &LastKeys { inputs, window })
    }
}
