//! Drawing of the next token.

use super::distribution::{Distribution, possible, scores};
use super::error::SampleError;
use rand::rngs::ChaCha8Rng;
use rand::{Rng, SeedableRng};

/// Draws the next token from logits.
///
/// The steps have the order and the definitions of Hugging Face's `transformers`:
///
/// 1. the **repetition penalty** divides positive logits, and multiplies negative ones, of tokens that the prompt or
///    the text contains;
/// 2. the **temperature** divides all logits; at 0, the most likely token is taken, the first among equals;
/// 3. **top-k** keeps the `k` greatest logits, and those equal to the least of them;
/// 4. **top-p** keeps the fewest most likely tokens, at least one, whose probabilities reach `p`; equally likely
///    tokens are ordered by index;
/// 5. **min-p** keeps the tokens whose probability is at least `min_p` times the greatest;
/// 6. a token is drawn from the softmax of the rest.
///
/// A draw depends only on the seed, the index of the sequence and the number of the token: a text depends on the
/// other prompts of a batch only as far as its logits do.
///
/// Tokens are drawn on the host, which reads 4 bytes per token of the vocabulary in each step and sequence. Greedy
/// texts without a penalty read one number per sequence: the device finds the greatest logit, where backends differ
/// in the choice between equal ones.
///
/// ```
/// # use flash_dma_models::generate::{Draw, Purpose, Sampler};
/// let sampler = Sampler::random(7).with_temperature(0.8).with_top_k(40).with_top_p(0.95);
/// let law = sampler.try_distribution(&[0.0, 2.0, 1.0], &[]).unwrap();
/// let first = Draw { sequence: 0, token: 0, purpose: Purpose::Token };
/// let token = law.at(sampler.unit(first));
/// assert!(law.probability(token) > 0.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    seed: u64,
    temperature: f64,
    top_k: Option<usize>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repetition_penalty: f64,
}

impl Default for Sampler {
    fn default() -> Self {
        Self::greedy()
    }
}

impl Sampler {
    /// The most likely token: temperature 0.
    #[must_use]
    pub fn greedy() -> Self {
        Self::random(0).with_temperature(0.0)
    }

    /// A token from the softmax of the logits: temperature 1.
    #[must_use]
    pub fn random(seed: u64) -> Self {
        Self {
            seed,
            temperature: 1.0,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: 1.0,
        }
    }

    /// Divides the logits: at least 0, where 0 is greedy.
    #[must_use]
    pub fn with_temperature(mut self, temperature: f64) -> Self {
        self.temperature = temperature;
        self
    }

    /// Keeps this many tokens, at least 1.
    #[must_use]
    pub fn with_top_k(mut self, count: usize) -> Self {
        self.top_k = Some(count);
        self
    }

    /// Keeps the most likely tokens until they reach this probability, from 0 to 1.
    #[must_use]
    pub fn with_top_p(mut self, probability: f64) -> Self {
        self.top_p = Some(probability);
        self
    }

    /// Keeps the tokens of at least this fraction of the greatest probability, from 0 to 1.
    #[must_use]
    pub fn with_min_p(mut self, part: f64) -> Self {
        self.min_p = Some(part);
        self
    }

    /// Penalises tokens that have occurred: above 1 they become less likely, below 1 more; 1 is no penalty.
    #[must_use]
    pub fn with_repetition_penalty(mut self, penalty: f64) -> Self {
        self.repetition_penalty = penalty;
        self
    }

    /// The sampler's temperature.
    #[must_use]
    pub fn temperature(&self) -> f64 {
        self.temperature
    }

    /// True if it takes the greatest logit as it is.
    #[must_use]
    pub fn is_plain_greedy(&self) -> bool {
        self.temperature == 0.0 && self.repetition_penalty == 1.0
    }

    /// Checks that every setting is in its range.
    ///
    /// # Errors
    ///
    /// [`SampleError::Range`].
    pub fn try_check(&self) -> Result<(), SampleError> {
        let check = |name, value: f64, fits, range| match fits && value.is_finite() {
            true => Ok(()),
            false => Err(SampleError::Range { name, value, range }),
        };
        let (temperature, penalty) = (self.temperature, self.repetition_penalty);
        let fits = temperature >= 0.0;
        check("temperature", temperature, fits, "finite and at least 0")?;
        check("top_k", 0.0, self.top_k != Some(0), "at least 1")?;
        for (name, p) in [("top_p", self.top_p), ("min_p", self.min_p)] {
            let p = p.unwrap_or(1.0);
            check(name, p, (0.0..=1.0).contains(&p), "from 0 to 1")?;
        }
        let fits = penalty > 0.0;
        check("repetition_penalty", penalty, fits, "finite and above 0")
    }

    /// Distribution of the next token, from `logits` of the whole vocabulary; only the repetition penalty reads the
    /// tokens of `history`.
    ///
    /// # Errors
    ///
    /// [`SampleError`] if a setting is out of its range, or the logits contain NaN, +∞, or only −∞.
    pub fn try_distribution(
        &self,
        logits: &[f32],
        history: &[u32],
    ) -> Result<Distribution, SampleError> {
        self.try_check()?;
        let mut scores = scores(logits)?;
        self.penalise(&mut scores, history);
        let mut kept: Vec<(u32, f64)> = possible(scores).collect();
        // The first of equal scores: `max_by` would return the last.
        let best =
            (kept.iter().copied()).reduce(|best, next| if next.1 > best.1 { next } else { best });
        let (token, best) = best.ok_or(SampleError::Impossible)?;
        if self.temperature == 0.0 {
            return Ok(Distribution::certain(token));
        }
        // The difference first: a quotient may overflow. It is at most 0.
        (kept.iter_mut()).for_each(|(_, score)| *score = (*score - best) / self.temperature);
        if let Some(count) = self.top_k {
            keep_greatest(&mut kept, count);
        }
        // From here on weights: the greatest is 1.
        kept.iter_mut().for_each(|(_, score)| *score = score.exp());
        if let Some(probability) = self.top_p {
            keep_most_likely(&mut kept, probability);
        }
        if let Some(part) = self.min_p {
            kept.retain(|&(_, weight)| weight >= part);
        }
        Ok(Distribution::of_weights(kept))
    }

    /// Applies the repetition penalty once per token, however often it occurred.
    pub(super) fn penalise(&self, scores: &mut [f64], history: &[u32]) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        let mut tokens: Vec<usize> = history.iter().map(|&token| token as usize).collect();
        tokens.sort_unstable();
        tokens.dedup();
        for token in tokens {
            let Some(score) = scores.get_mut(token) else {
                return;
            };
            *score = match *score < 0.0 {
                true => *score * self.repetition_penalty,
                // Finite, like everything it is compared with.
                false => (*score / self.repetition_penalty).min(f64::MAX),
            };
        }
    }

    /// A number from 0 to below 1 that depends only on the seed and the draw.
    #[must_use]
    pub fn unit(&self, draw: Draw) -> f64 {
        let mut generator = ChaCha8Rng::seed_from_u64(self.seed);
        generator.set_stream(draw.sequence as u64);
        // A block of 16 words per token, two words per purpose.
        let word = draw.token as u128 * 16 + draw.purpose as u128 * 2;
        generator.set_word_pos(word);
        (generator.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Identifies a random number by its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Draw {
    /// The index of the sequence.
    pub sequence: usize,
    /// Number of tokens written before this one.
    pub token: usize,
    /// Purpose of the draw.
    pub purpose: Purpose,
}

/// Purpose of a random number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// The token itself.
    Token = 0,
    /// A draft's proposal for it.
    Proposal = 1,
    /// Acceptance of the proposal.
    Acceptance = 2,
    /// Replacement of a rejected proposal.
    Replacement = 3,
}

/// Keeps the `count` greatest, and those equal to the least of them.
fn keep_greatest(kept: &mut Vec<(u32, f64)>, count: usize) {
    if count >= kept.len() {
        return;
    }
    let mut values: Vec<f64> = kept.iter().map(|&(_, score)| score).collect();
    let (_, &mut least, _) = values.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
    kept.retain(|&(_, score)| score >= least);
}

/// Keeps the most likely until their sum reaches `probability`, at least one, then orders by token.
fn keep_most_likely(kept: &mut Vec<(u32, f64)>, probability: f64) {
    // All of them: the sum below would lose those that vanish in it.
    if probability >= 1.0 {
        return;
    }
    // Stable: of equal weights the lower token comes first.
    kept.sort_by(|a, b| b.1.total_cmp(&a.1));
    let enough = probability * kept.iter().map(|&(_, weight)| weight).sum::<f64>();
    let mut before = 0.0;
    let cut = kept.iter().position(|&(_, weight)| {
        let full = before >= enough;
        before += weight;
        full
    });
    kept.truncate(cut.unwrap_or(kept.len()).max(1));
    kept.sort_unstable_by_key(|&(token, _)| token);
}
