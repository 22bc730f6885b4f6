//! The parts of a layer's configuration.

use super::scorer::{Learns, Scores};
use crate::functions::selector::Selector;
use burn::config::Config;
use flash_dma_problem::{AlibiSlopes, AttentionError, ScoreRole, SelectionRule};
use serde::{Deserialize, Serialize};

/// Minimum of the default number of runners-up: a quarter of a small window teaches too little.
const LEAST_RUNNERS_UP: usize = 8;

/// Which keys a query keeps, in training and in decoding.
///
/// ```
/// # use burn_flash_dma::nn::Selection;
/// // The last 128 keys, the first one, and the 383 best of the others.
/// let selection = Selection::keep(512).with_sinks(1);
/// assert_eq!(selection.window, Some(512));
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct Selection {
    /// Number of keys that each query keeps. Default: all, which is dense attention (with a bias per key if the
    /// scores are added to the logits).
    pub window: Option<usize>,
    /// How many of the most recent keys are always kept. Counts toward `window`. Default: a quarter of the window in
    /// force, or what sinks leave of it; 0 with [`Scores::Dma`] or without causal masking (which accepts only 0).
    pub recent: Option<usize>,
    /// How many of the first keys of a sequence (of each document) rank above all others. Counts toward `window`.
    /// Only with a window and causal masking.
    #[config(default = 0)]
    pub sinks: usize,
    /// Gives heads different reaches: in key/value heads 0, 2, 4, … each token ranks 1 / window higher than the same
    /// token one position earlier; in the others position does not matter. No effect on a single head, without causal
    /// masking, or with scores that are added to the logits. Default: true.
    #[config(default = true)]
    pub recency: bool,
    /// Deals runs of this many tokens to the key/value heads in turn, so that heads with small windows do not all
    /// keep the same ones: the token at position `p` belongs to head `p / turns % n_kv_heads`, and in every other
    /// head ranks below all tokens of that head. Positions count from the start of the row, also with packed
    /// documents. Only with [`Scores::Ranking`]. Default: off.
    pub turns: Option<usize>,
}

impl Selection {
    /// The best keys of a window, a quarter of which are the most recent ones.
    #[must_use]
    pub fn keep(window: usize) -> Self {
        Self::new().with_window(Some(window))
    }

    /// The last `window` keys, whatever their scores.
    #[must_use]
    pub fn last(window: usize) -> Self {
        Self::keep(window).with_recent(Some(window))
    }
}

/// How scores learn from their ranks. Changes no output. Default of a layer: [`of`](Self::of) its scores.
#[derive(Config, Debug, PartialEq)]
pub struct ScoreLearning {
    /// Number of runners-up, the keys that just missed the window, whose scores learn the gain they would have
    /// brought, see [`Selector::runners_up`](crate::Selector::runners_up). Default: a quarter of the window in force,
    /// at least 8; 0 under a mask that differs between queries.
    pub runners_up: Option<usize>,
    /// Kept keys learn too: their scores get the gradient of what the keys are worth, even where nothing is evicted,
    /// see [`Selector::leave_one_out`](crate::Selector::leave_one_out). Refused in training under a mask that differs
    /// between queries. Default: true.
    #[config(default = true)]
    pub kept: bool,
    /// Centres the rank gradients of a head so that they sum to zero, see
    /// [`Selector::compete`](crate::Selector::compete). Default: true.
    #[config(default = true)]
    pub compete: bool,
    /// Lets the gradient of the scores reach the tokens (with [`Scores::Dma`] their values) as well as the score
    /// projection, whose gradient is the same either way. Default: false.
    #[config(default = false)]
    pub tokens: bool,
}

impl ScoreLearning {
    /// No learning from ranks: scores that only rank stay at their initial projection.
    #[must_use]
    pub fn none() -> Self {
        Self {
            runners_up: Some(0),
            kept: false,
            compete: false,
            tokens: false,
        }
    }

    /// Default for these scores. [`Scores::Ranking`]: learns from all ranks, and not through the tokens. Scores that
    /// are added to the logits learn from that, tokens included; [`Scores::Added`] also from runners-up.
    #[must_use]
    pub fn of(scores: Scores) -> Self {
        let by_logits = Self::none().with_tokens(true);
        match scores {
            Scores::Ranking => Self::new(),
            Scores::Added => by_logits.with_runners_up(None),
            Scores::Dma => by_logits,
        }
    }

    /// Adds this learning to a selector with this window.
    pub(super) fn taught(&self, selector: Selector, window: usize) -> Selector {
        selector
            .runners_up(self.runners_up(window))
            .leave_one_out(self.kept)
            .compete(self.compete)
    }

    pub(super) fn runners_up(&self, window: usize) -> usize {
        self.runners_up
            .unwrap_or((window / 4).max(LEAST_RUNNERS_UP))
    }

    /// Name of the keys that are explicitly configured to learn from ranks; `None` for defaults.
    pub(super) fn asked_for(&self) -> Option<&'static str> {
        let runners_up = self.runners_up.filter(|&runners_up| runners_up > 0);
        let kept = || self.kept.then_some("kept keys that learn");
        runners_up.map(|_| "runners-up").or_else(kept)
    }

    /// Parts that learn from a loss of the scores themselves.
    pub(super) fn by_themselves(&self) -> Learns {
        match self.tokens {
            true => Learns::Tokens,
            false => Learns::Projection,
        }
    }

    /// Parts that learn through the scores from a loss of the layer's output; `window` is `None` if nothing is
    /// evicted.
    pub(super) fn in_training(&self, scores: Scores, window: Option<usize>) -> Learns {
        let idle = window.is_none() || !self.by_rank();
        match scores.role() == ScoreRole::Rank && idle {
            true => Learns::Nothing,
            false => self.by_themselves(),
        }
    }

    /// True if scores that only rank would learn.
    fn by_rank(&self) -> bool {
        self.kept || self.runners_up != Some(0)
    }
}

/// How a layer's logits are computed and turned into weights.
#[derive(Config, Debug, PartialEq)]
pub struct Logits {
    /// A query sees no key after itself. Default: true.
    #[config(default = true)]
    pub causal: bool,
    /// Factor on `q . k`. Default: `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Cap of the scaled product `q . k`: `c * tanh(x / c)`. Default: none.
    pub softcap: Option<f32>,
    /// ALiBi slopes, one per query head, for example [`AlibiSlopes::standard`]. Default: none. A cache refuses a
    /// layer with them.
    pub alibi: Option<AlibiSlopes>,
    /// Adds a learned sink logit per query head; its probability goes to no value, see
    /// [`learnable_sink`](crate::learnable_sink()). Default: false.
    #[config(default = false)]
    pub sink: bool,
    /// Probability, below 1, of dropping a query-key pair in training, see [`Dropout`](crate::Dropout). Every call
    /// draws a new mask, and none outside training, as with Burn's dropout. Default: 0.
    #[config(default = 0.0)]
    pub dropout: f64,
}

/// Norm of each head of q and k, applied before the rotary encoding.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum QkNorm {
    /// No norm.
    None,
    /// RMS norm with this epsilon.
    Rms(f64),
}

impl Default for QkNorm {
    fn default() -> Self {
        Self::Rms(1e-5)
    }
}

/// Rotary position encoding of q and k.
#[derive(Config, Debug, PartialEq)]
pub struct Rope {
    /// Length of the table: the longest sequence that one pass over a whole sequence takes.
    pub positions: usize,
    /// Base of the frequencies.
    #[config(default = 10000.0)]
    pub base: f32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    /// `None` for a quarter of the window.
    recent: Option<usize>,
    sinks: usize,
}

impl Rule {
    /// The rule of a layer, checked with the window of its configuration.
    ///
    /// # Errors
    ///
    /// [`AttentionError::PartsWithoutWindow`], or those of [`check`](Self::check).
    pub(super) fn try_new(
        selection: &Selection,
        scores: Scores,
        causal: bool,
    ) -> Result<Self, AttentionError> {
        let sinks = selection.sinks;
        let without = !causal || scores == Scores::Dma;
        let recent = selection.recent.or(without.then_some(0));
        let parts = [recent.unwrap_or_default(), sinks];
        if selection.window.is_none() && parts != [0, 0] {
            let [recent, sinks] = parts;
            return Err(AttentionError::PartsWithoutWindow { recent, sinks });
        }
        if !causal && (recent != Some(0) || sinks > 0) {
            return Err(AttentionError::SelectionNotCausal);
        }
        let rule = Self { recent, sinks };
        rule.check(selection.window)?;
        Ok(rule)
    }

    /// The rule for a window; `None` keeps all keys.
    pub(super) fn of(self, window: Option<usize>) -> SelectionRule {
        // The first and the last keys are among all keys, so they need no rule.
        let Some(window) = window else {
            return SelectionRule::from(usize::MAX);
        };
        let share = (window / 4).min(window.saturating_sub(self.sinks));
        SelectionRule {
            window,
            recent: self.recent.unwrap_or(share),
            sinks: self.sinks,
        }
    }

    /// Checks that recent keys and sinks fit into a window.
    ///
    /// # Errors
    ///
    /// [`AttentionError::ZeroWindow`] or [`AttentionError::WindowParts`].
    pub(super) fn check(self, window: Option<usize>) -> Result<(), AttentionError> {
        self.of(window).check()
    }
}

/// Warns if scores that only rank do nothing or learn nothing.
pub(super) fn warn_of_idle_scores(
    layer: &str,
    scores: Scores,
    rule: Option<SelectionRule>,
    learning: &ScoreLearning,
) {
    if scores != Scores::Ranking {
        return;
    }
    match rule {
        None if learning.by_rank() => tracing::warn!(
            target: "flash_dma",
            "{layer}: its scores only rank, and without a window nothing is ranked: give it one, or let the scores learn \
             nothing"
        ),
        Some(rule) if rule.ranked() > 0 && !learning.by_rank() => tracing::warn!(
            target: "flash_dma",
            "{layer}: it keeps {} of {} keys by scores that only rank, and none of them learns: let runners-up or kept \
             keys do so",
            rule.ranked(),
            rule.window,
        ),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a window that changes, a quarter of each is recent, runners-up are a quarter of it or 8, and sinks come
    /// first.
    #[test]
    fn shares_are_those_of_the_window_in_force() {
        let ranks = |selection: Selection| Rule::try_new(&selection, Scores::Ranking, true);
        let learning = ScoreLearning::new();
        let (plain, sinks) = (Selection::keep(64), Selection::keep(64).with_sinks(7));
        let [plain, sinks] = [plain, sinks].map(|selection| ranks(selection).expect("it fits"));
        for window in 8..=4096 {
            assert!(plain.check(Some(window)).is_ok() && sinks.check(Some(window)).is_ok());
            let [plain, sinks] = [plain, sinks].map(|rule| rule.of(Some(window)));
            assert_eq!((plain.recent, plain.sinks), (window / 4, 0));
            assert_eq!(sinks.recent, (window / 4).min(window - 7));
            assert_eq!(learning.runners_up(window), (window / 4).max(8));
            assert_eq!(ScoreLearning::of(Scores::Dma).runners_up(window), 0);
        }
        assert!(sinks.check(Some(6)).is_err());
        // A fixed number of recent keys does not change with the window.
        let some = ranks(Selection::keep(64).with_recent(Some(16))).expect("it fits");
        assert_eq!(some.of(Some(20)).recent, 16);
        assert!(some.check(Some(15)).is_err());
    }

    #[test]
    fn without_causal_masking_and_of_dmas_scores_none_are_recent() {
        for (scores, causal) in [(Scores::Ranking, false), (Scores::Dma, true)] {
            let rule = Rule::try_new(&Selection::keep(64), scores, causal).expect("it fits");
            assert_eq!(rule.of(Some(64)).recent, 0);
        }
        let all = Rule::try_new(&Selection::new(), Scores::Ranking, true).expect("it fits");
        assert_eq!(all.of(None), SelectionRule::from(usize::MAX));
    }
}
