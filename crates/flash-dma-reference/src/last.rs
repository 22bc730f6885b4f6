//! Attention to the last keys: position by position, by definition.

use crate::attention::Inputs;
use crate::naive::{self, NaiveForward};
use crate::rows::Forward;
use crate::rows::{self, At, Keys, Pairs, kv_keys};

impl Inputs {
    /// The output and the LSE if every position attends to the last `window` keys that it sees, including its own,
    /// except those of a score of −∞; scores are added to the logits if there are any.
    #[must_use]
    pub fn forward_last(&self, window: usize) -> Forward {
        rows::forward(&self.tensors(), &self.last_keys(window))
    }

    /// [`Inputs::forward_last`] by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_forward_last(&self, window: usize) -> NaiveForward {
        naive::forward(&self.tensors(), &self.last_keys(window))
    }

    /// The last keys of every row, except those of a score of −∞.
    fn last_keys(&self, window: usize) -> impl Pairs {
        let p = &self.problem;
        move |[b, h, i]: At| -> Keys {
            let end = rows::visible(p, i).end;
            let scores = (self.scores.as_ref()).map(|scores| &scores[kv_keys(p, b, h)]);
            let score = |key: usize| scores.map_or(0.0, |scores| scores[key]);
            let last = (end.saturating_sub(window)..end).map(|key| (key, score(key)));
            last.filter(|&(_, score)| score != f64::NEG_INFINITY)
                .collect()
        }
    }
}
