//! Laws of the next token.

use super::error::SampleError;

/// A law of the next token: those that are possible, by token, and their probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    /// Ascending tokens, and their probabilities, which are above 0 and sum to 1.
    entries: Vec<(u32, f64)>,
}

impl Distribution {
    /// One token and no other.
    #[must_use]
    pub fn certain(token: u32) -> Self {
        let entries = vec![(token, 1.0)];
        Self { entries }
    }

    /// Weights of ascending tokens with a sum above 0. A weight of 0 is left out.
    pub(super) fn of_weights(mut entries: Vec<(u32, f64)>) -> Self {
        entries.retain(|&(_, weight)| weight > 0.0);
        let total: f64 = entries.iter().map(|&(_, weight)| weight).sum();
        entries.iter_mut().for_each(|(_, weight)| *weight /= total);
        Self { entries }
    }

    /// The probability of a token.
    #[must_use]
    pub fn probability(&self, token: u32) -> f64 {
        let at = (self.entries).binary_search_by_key(&token, |&(token, _)| token);
        at.map_or(0.0, |at| self.entries[at].1)
    }

    /// The possible tokens, ascending.
    pub fn tokens(&self) -> impl Iterator<Item = u32> + '_ {
        self.entries.iter().map(|&(token, _)| token)
    }

    /// The token that the inverse of the cumulative probability takes `unit` to, which is from 0 to 1.
    #[must_use]
    pub fn at(&self, unit: f64) -> u32 {
        let mut rest = unit;
        for &(token, probability) in &self.entries {
            if rest < probability {
                return token;
            }
            rest -= probability;
        }
        // The probabilities sum to 1 but for rounding.
        self.entries.last().map_or(0, |&(token, _)| token)
    }

    /// What is left of this law where `other` is taken away: the law of the token in place of one of `other`'s that
    /// was not accepted.
    pub(super) fn without(&self, other: &Self) -> Self {
        let left = |&(token, probability): &(u32, f64)| {
            (token, (probability - other.probability(token)).max(0.0))
        };
        let left: Vec<(u32, f64)> = self.entries.iter().map(left).collect();
        if left.iter().all(|&(_, weight)| weight == 0.0) {
            // The laws are equal but for rounding, so nothing is refused but by rounding.
            return self.clone();
        }
        Self::of_weights(left)
    }
}

/// The logits in f64.
pub(super) fn scores(logits: &[f32]) -> Result<Vec<f64>, SampleError> {
    if logits.iter().any(|logit| logit.is_nan()) {
        return Err(SampleError::NotANumber);
    }
    if let Some(token) = logits.iter().position(|&logit| logit == f32::INFINITY) {
        return Err(SampleError::Infinite {
            token: token as u32,
        });
    }
    Ok(logits.iter().map(|&logit| f64::from(logit)).collect())
}

/// The tokens that are possible, with their scores.
pub(super) fn possible(scores: Vec<f64>) -> impl Iterator<Item = (u32, f64)> {
    let all = (0..).zip(scores);
    all.filter(|&(_, score)| score > f64::NEG_INFINITY)
}

/// The log probabilities of scores.
pub(super) fn log_softmax(mut scores: Vec<f64>) -> Result<Vec<f64>, SampleError> {
    let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if best == f64::NEG_INFINITY {
        return Err(SampleError::Impossible);
    }
    let sum: f64 = scores.iter().map(|score| (score - best).exp()).sum();
    let log_sum = best + sum.ln();
    scores.iter_mut().for_each(|score| *score -= log_sum);
    Ok(scores)
}
