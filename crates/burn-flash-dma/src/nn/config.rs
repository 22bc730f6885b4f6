//! The groups of a layer's configuration.

use super::scorer::{Learns, Scores};
use crate::functions::selector::Selector;
use burn::config::Config;
use flash_dma_problem::{AlibiSlopes, AttentionError, ScoreRole, SelectionRule};
use serde::{Deserialize, Serialize};

/// The fewest runners-up of a window by default: of small windows a quarter teaches too little.
const LEAST_RUNNERS_UP: usize = 8;

/// Which keys a query keeps: what decoding needs as well as training.
///
/// ```
/// # use burn_flash_dma::nn::Selection;
/// // The last 128 keys, the first one, and the 383 best of the others.
/// let selection = Selection::keep(512).with_sinks(1);
/// assert_eq!(selection.window, Some(512));
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct Selection {
    /// Number of keys that each query keeps. Default: all, that is dense attention, with a bias per key if the scores are
    /// added to the logits.
    pub window: Option<usize>,
    /// The last keys that each query keeps whatever their scores, counted in the window. Default: a quarter of the window
    /// in force, or what sinks leave of it; none with [`Scores::Dma`] and without causal masking, which refuses any.
    pub recent: Option<usize>,
    /// The first keys of a sequence (of each document) that rank above all others, counted in the window. With a window
    /// and causal only.
    #[config(default = 0)]
    pub sinks: usize,
    /// Whether key/value heads differ in how far back they keep keys: in the first one, and every other one from there, a
    /// token ranks higher than the same token one position before it, by 1 / window; in the others it ranks alike
    /// wherever it stands. Of a single head, without causal masking and with scores that do more than rank nothing changes.
    #[config(default = true)]
    pub recency: bool,
    /// Deals tokens to the key/value heads in turn, so many in a row, so that heads of small windows do not all learn to
    /// keep the same ones: a token at position `p` is the own one of head `p / turns % n_kv_heads`, and ranks below all
    /// own tokens in every other. Positions are those of a sequence, of packed documents those of their row. Default: no.
    /// For scores that only rank.
    pub turns: Option<usize>,
}

impl Selection {
    /// The best keys of a window, a quarter of which are the last ones.
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

/// Training of scores by their ranks. Nothing here changes an output. A layer that is told nothing of it has
/// [`of`](Self::of) its scores.
#[derive(Config, Debug, PartialEq)]
pub struct ScoreLearning {
    /// The keys ranked next after the window whose scores learn what they would be worth, see
    /// [`Selector::runners_up`](crate::Selector::runners_up). Default: a quarter of the window in force, at least 8; none
    /// under a mask that differs between queries.
    pub runners_up: Option<usize>,
    /// Whether the scores of kept keys learn what those are worth, see
    /// [`Selector::leave_one_out`](crate::Selector::leave_one_out): also where nothing is evicted. Refused under a mask that
    /// differs between queries.
    #[config(default = true)]
    pub kept: bool,
    /// Whether what some scores of a head gain is charged to all, see
    /// [`Selector::compete`](crate::Selector::compete).
    #[config(default = true)]
    pub compete: bool,
    /// Whether tokens (with [`Scores::Dma`] their values) learn through their scores, beside what they learn through
    /// attention. What the projection of the scores learns is the same.
    #[config(default = false)]
    pub tokens: bool,
}

impl ScoreLearning {
    /// Nothing: scores that only rank stay the projection that they are.
    #[must_use]
    pub fn none() -> Self {
        Self {
            runners_up: Some(0),
            kept: false,
            compete: false,
            tokens: false,
        }
    }

    /// Default learning of scores: all ranks of those that only rank, and no tokens; those that are added to the logits
    /// learn by that, tokens included, and linear ones by their runners-up as well.
    #[must_use]
    pub fn of(scores: Scores) -> Self {
        let by_logits = Self::none().with_tokens(true);
        match scores {
            Scores::Ranking => Self::new(),
            Scores::Added => by_logits.with_runners_up(None),
            Scores::Dma => by_logits,
        }
    }

    /// A selector of so many keys whose scores learn as this says.
    pub(super) fn taught(&self, selector: Selector, window: usize) -> Selector {
        selector
            .runners_up(self.runners_up(window))
            .leave_one_out(self.kept)
            .compete(self.compete)
    }

    /// The runners-up of a window.
    fn runners_up(&self, window: usize) -> usize {
        self.runners_up
            .unwrap_or((window / 4).max(LEAST_RUNNERS_UP))
    }

    /// The keys that are asked for to learn by their ranks, in words; those of the default are not asked for.
    pub(super) fn asked_for(&self) -> Option<&'static str> {
        let runners_up = self.runners_up.filter(|&runners_up| runners_up > 0);
        let kept = || self.kept.then_some("kept keys that learn");
        runners_up.map(|_| "runners-up").or_else(kept)
    }

    /// The parts that learn through scores in a loss of these.
    pub(super) fn by_themselves(&self) -> Learns {
        match self.tokens {
            true => Learns::Tokens,
            false => Learns::Projection,
        }
    }

    /// The parts that learn through scores in a loss of a layer's output: `window` is what it evicts by, if it does.
    pub(super) fn in_training(&self, scores: Scores, window: Option<usize>) -> Learns {
        let idle = window.is_none() || !self.by_rank();
        match scores.role() == ScoreRole::Rank && idle {
            true => Learns::Nothing,
            false => self.by_themselves(),
        }
    }

    /// Whether scores that only rank would learn.
    fn by_rank(&self) -> bool {
        self.kept || self.runners_up != Some(0)
    }
}

/// How the logits of a layer are made of q, k and the scores, and weighed.
#[derive(Config, Debug, PartialEq)]
pub struct Logits {
    /// Whether a query sees only the keys up to itself.
    #[config(default = true)]
    pub causal: bool,
    /// Factor on `q . k`. Default: `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Cap of the scaled product `q . k`: `c * tanh(x / c)`. Default: none.
    pub softcap: Option<f32>,
    /// ALiBi: what distances take from the logits, by a slope per query head, for example
    /// [`AlibiSlopes::standard`]. Default: none. A cache refuses a layer with it.
    pub alibi: Option<AlibiSlopes>,
    /// Whether each query head has one more logit, which is learned and has no key, see
    /// [`learnable_sink`](crate::learnable_sink()).
    #[config(default = false)]
    pub sink: bool,
    /// The probability, less than 1, with which a pair of a query and a key is dropped, see [`Dropout`](crate::Dropout).
    /// Every call of the layer draws another mask, none outside of training, as Burn's own dropout.
    #[config(default = 0.0)]
    pub dropout: f64,
}

/// The norm of each head of q and k, before the rotary encoding.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum QkNorm {
    /// None.
    None,
    /// An RMS norm with this epsilon.
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
    /// The longest sequence of a pass over whole sequences.
    pub positions: usize,
    /// Base of the frequencies.
    #[config(default = 10000.0)]
    pub base: f32,
}

/// A layer's rule of selection, whatever its window is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    /// `None` is a quarter of the window.
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

    /// The rule of a window, `None` for all keys.
    pub(super) fn of(self, window: Option<usize>) -> SelectionRule {
        // Of all keys the first and the last ones are among them.
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

    /// Refuses a window that its parts do not fit into.
    ///
    /// # Errors
    ///
    /// [`AttentionError::ZeroWindow`] or [`AttentionError::WindowParts`].
    pub(super) fn check(self, window: Option<usize>) -> Result<(), AttentionError> {
        self.of(window).check()
    }
}

/// Warns of scores that only rank and that would do nothing or learn nothing.
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

    /// In a schedule of windows a quarter of each is recent, runners-up are a quarter of it or eight, and sinks come
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
        // Of a number of recent keys no share is taken.
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
