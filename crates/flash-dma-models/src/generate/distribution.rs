//! Distributions of the next token.

use super::error::SampleError;

/// A distribution of the next token: possible tokens and their probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    /// Ascending tokens, and their probabilities, which are above 0 and sum to 1.
    entries: Vec<(u32, f64)>,
}

impl Distribution {
    /// The distribution with a single token.
    #[must_use]
    pub fn certain(token: u32) -> Self {
        let entries = vec![(token, 1.0)];
        Self { entries }
    }

    /// Normalises weights of ascending tokens, whose sum is above 0. Weights of 0 are left out.
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

    /// The token at the quantile `unit`, from 0 to 1.
    #[must_use]
    pub fn at(&self, unit: f64) -> u32 {
        let mut rest = unit;
        for &(token, probability) in &self.entries {
            if rest < probability {
                return token;
            }
            rest -= probability;
        }
        // The probabilities sum to 1 up to rounding.
        self.entries.last().map_or(0, |&(token, _)| token)
    }

    /// The normalised positive part of this distribution minus `other`: the distribution of the token that replaces a
    /// rejected one from `other`.
    pub(super) fn without(&self, other: &Self) -> Self {
        let left = |&(token, probability): &(u32, f64)| {
            (token, (probability - other.probability(token)).max(0.0))
        };
        let left: Vec<(u32, f64)> = self.entries.iter().map(left).collect();
        if left.iter().all(|&(_, weight)| weight == 0.0) {
            // The distributions are equal up to rounding, so only rounding can reject anything.
            return self.clone();
        }
        Self::of_weights(left)
    }
}

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

pub(super) fn possible(scores: Vec<f64>) -> impl Iterator<Item = (u32, f64)> {
    let all = (0..).zip(scores);
    all.filter(|&(_, score)| score > f64::NEG_INFINITY)
}

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
