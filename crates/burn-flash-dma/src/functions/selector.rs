//! Rules that turn scores into intervals.

use super::composition::{compose, kept_by_rank_from};
use super::selection::{Intervals, LearningRank, Origin};
use crate::documents::Documents;
use crate::engines::check_backend;
use crate::fallback::tensors::{constant, ints};
use crate::validate::{check_len, is_tracked, scores_as_f32};
use burn::tensor::{DType, FloatDType, Int, Tensor};
use flash_dma_problem::tensors::RankLearning;
use flash_dma_problem::{AttentionError, SelectionRule};

/// How many keys a query keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Window {
    /// The same number for every head.
    Uniform(usize),
    /// One number per key/value head.
    PerHead(Vec<usize>),
}

impl From<usize> for Window {
    fn from(window: usize) -> Self {
        Self::Uniform(window)
    }
}

impl From<Vec<usize>> for Window {
    fn from(windows: Vec<usize>) -> Self {
        Self::PerHead(windows)
    }
}

/// A rule that turns scores into [`Intervals`]: which of its visible keys a position attends to.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_dma::{Documents, Selector};
///
/// let scores = Tensor::<3>::random([1, 2, 100], Distribution::Default, &Device::flex());
/// // The first key of each document, the last 8, and the 7 best of the others.
/// let selector = Selector::top(16).recent(8).sinks(1);
/// let selector = selector.documents(Documents::from_lengths([vec![40, 60]]));
/// let intervals = selector.select(scores);
/// assert_eq!(intervals.max_live(), 16);
/// # }
/// ```
///
/// The parts compose. With a window `w`, `r` recent keys and `s` sinks, a position attends to its last `r` keys and
/// to the `w − r` keys that rank highest among the older ones; the first `s` keys rank above all others. Recency goes
/// by position: a hidden key (a score of −∞) is not attended, but uses up its place among the recent ones. A hidden
/// sink stays hidden. With documents all of this holds inside each document.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "nothing is selected before `select`"]
pub struct Selector {
    window: Window,
    recent: usize,
    sinks: usize,
    documents: Option<Documents>,
    runners_up: usize,
    leave_one_out: bool,
    compete: bool,
}

impl Selector {
    /// The `window` highest scored visible keys of each query: one number, or one per key/value head.
    pub fn top(window: impl Into<Window>) -> Self {
        Self {
            window: window.into(),
            recent: 0,
            sinks: 0,
            documents: None,
            runners_up: 0,
            leave_one_out: false,
            compete: false,
        }
    }

    /// Always keeps the last `recent` keys. They count toward the window.
    pub fn recent(mut self, recent: usize) -> Self {
        self.recent = recent;
        self
    }

    /// Ranks the first `sinks` keys above all others once they are no longer recent. They count toward the window.
    pub fn sinks(mut self, sinks: usize) -> Self {
        self.sinks = sinks;
        self
    }

    /// Selects inside each document; no token attends to another document.
    pub fn documents(mut self, documents: Documents) -> Self {
        self.documents = Some(documents);
        self
    }

    /// Gives the scores of the `runners_up` best keys outside the window a gradient
    /// ([`runner_up_ends`](Intervals::runner_up_ends)). It belongs to the tensor passed to [`select`](Self::select),
    /// whatever tensor attention adds to the logits. Costs a second selection, made only if autodiff tracks the scores.
    pub fn runners_up(mut self, runners_up: usize) -> Self {
        self.runners_up = runners_up;
        self
    }

    /// Lets kept keys learn: the scores of keys kept by their rank get the gradient of what the keys are worth, see
    /// [`OWN_OUTPUT_WEIGHT`](crate::OWN_OUTPUT_WEIGHT), with or without runners-up. Recent keys and sinks learn
    /// nothing. The backward pass then multiplies each kept pair seven times instead of five. Like runners-up, only
    /// if autodiff tracks the scores.
    pub fn leave_one_out(mut self, leave_one_out: bool) -> Self {
        self.leave_one_out = leave_one_out;
        self
    }

    /// Centres the rank gradients of a head so that they sum to zero.
    ///
    /// Only differences between the ranks of a head matter: ranks have no scale and no zero. Without centring, each
    /// key gets its own gain `g`, and a scorer first learns whatever its tokens have in common, as all keys gain by
    /// that. With centring, a key gets
    ///
    /// ```text
    /// g - share * sum of g,    share = t / sum of t
    /// ```
    ///
    /// where `t` is the number of positions at which its rank keeps it or it is a runner-up, and both sums are over
    /// the keys of a head. So the ranks of a head learn nothing as a whole, and a key that is kept and useless falls.
    /// All documents of a sequence are centred together. No effect without [`runners_up`](Self::runners_up) or
    /// [`leave_one_out`](Self::leave_one_out).
    pub fn compete(mut self, compete: bool) -> Self {
        self.compete = compete;
        self
    }

    twin! {
        /// The intervals under this rule. `scores` is `[batch, kv_heads, k_len]`, f32 (f16 and bf16 are cast up). The
        /// greater score ranks first, then the lower index; NaN ranks below every number; −∞ is never kept. The
        /// result is a constant to autodiff.
        pub fn select(&self, scores: Tensor<3>) -> Intervals = Self::try_select;
    }

    /// Like [`select`](Self::select), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::ZeroWindow`], [`AttentionError::WindowParts`] if there are more recent keys and sinks than
    /// the (smallest) window, [`AttentionError::HeadWindows`], [`AttentionError::DocumentBatch`],
    /// [`AttentionError::DocumentTokens`], [`AttentionError::ElementType`], [`AttentionError::TooLarge`] or
    /// [`AttentionError::NoEngine`].
    pub fn try_select(&self, scores: Tensor<3>) -> Result<Intervals, AttentionError> {
        let heads = self.heads(scores.dims()[1])?;
        if let Some(documents) = &self.documents {
            documents.check(scores.dims())?;
        }
        check_backend(&scores.device())?;
        let scores = scores_as_f32(scores)?;
        let [batch, _, k_len] = scores.dims();
        check_len(k_len)?;
        if self.recent > 0 || self.documents.is_some() {
            // Sums of positions, and the number of tokens of all sequences, must fit 32 bits.
            check_len(2 * batch.max(1) * k_len)?;
        }
        let learns = self.runners_up > 0 || self.leave_one_out;
        let ranked = (learns && is_tracked(&scores)).then(|| scores.clone());
        let scores = constant(scores);
        let documents = self.documents.as_ref();
        let max_live = (heads.iter().map(|(rule, _)| rule.window).max()).unwrap_or(1);
        let tensor = each_head(&heads, &scores, |rule, z| compose(z, rule, documents));
        let learning = ranked.map(|rank| {
            let both = match self.runners_up {
                0 => tensor.clone(),
                more => each_head(&heads, &scores, |rule, z| {
                    compose(z, rule.widened(more), documents)
                }),
            };
            let parts = [self.recent, self.sinks];
            let reads_from = self.leave_one_out || self.compete;
            let from = reads_from.then(|| kept_by_rank_from(&scores, parts, documents));
            let ends = both.narrow(3, 1, 1).reshape(scores.dims());
            let charges = self.compete && !scores.dims().contains(&0);
            let shares = (from.clone().filter(|_| charges)).map(|from| shares(ends.clone() - from));
            let pairs = RankLearning {
                ends,
                max_live: max_live.saturating_add(self.runners_up),
                kept_from: from.filter(|_| self.leave_one_out),
            };
            LearningRank {
                rank,
                pairs,
                shares,
            }
        });
        let origin = Origin {
            recent: self.recent,
            sinks: self.sinks,
            documents: self.documents.clone(),
        };
        Ok(Intervals::new(tensor, learning, max_live, origin))
    }

    fn heads(&self, kv_heads: usize) -> Result<Vec<(SelectionRule, Vec<usize>)>, AttentionError> {
        let windows = match &self.window {
            Window::Uniform(window) => vec![*window; kv_heads.max(1)],
            Window::PerHead(windows) => windows.clone(),
        };
        let rule = |window| SelectionRule {
            window,
            recent: self.recent,
            sinks: self.sinks,
        };
        let mut rules: Vec<(SelectionRule, Vec<usize>)> = Vec::new();
        let mut sorted = windows.clone();
        sorted.sort_unstable();
        // The smallest window is the first that something does not fit into.
        for window in sorted {
            rule(window).check()?;
        }
        if matches!(self.window, Window::PerHead(_)) && windows.len() != kv_heads {
            return Err(AttentionError::HeadWindows {
                windows: windows.len(),
                kv_heads,
            });
        }
        for (head, window) in windows.into_iter().enumerate() {
            match rules.iter_mut().find(|(rule, _)| rule.window == window) {
                Some((_, heads)) => heads.push(head),
                None => rules.push((rule(window), vec![head])),
            }
        }
        Ok(rules)
    }
}

/// Intervals of all heads, assembled from those of each rule.
fn each_head(
    rules: &[(SelectionRule, Vec<usize>)],
    scores: &Tensor<3>,
    make: impl Fn(SelectionRule, Tensor<3>) -> Tensor<4, Int>,
) -> Tensor<4, Int> {
    let device = scores.device();
    match rules {
        [] => {
            let [batch, heads, k_len] = scores.dims();
            return Tensor::zeros([batch, heads, k_len, 2], (&device, DType::I32));
        }
        [(rule, _)] => return make(*rule, scores.clone()),
        _ => {}
    }
    let of = |heads: &[usize]| {
        let values = heads.iter().map(|&head| head as i32).collect();
        ints(values, [heads.len()], &device)
    };
    let parts = rules
        .iter()
        .map(|(rule, heads)| make(*rule, scores.clone().select(1, of(heads))));
    let made = Tensor::cat(parts.collect(), 1);
    let order: Vec<usize> = rules.iter().flat_map(|(_, heads)| heads.clone()).collect();
    if order.is_sorted() {
        return made;
    }
    let mut places = vec![0; order.len()];
    for (place, head) in order.into_iter().enumerate() {
        places[head] = place;
    }
    made.select(1, of(&places))
}

/// Keys per separately summed part of a row.
const PART: usize = 256;

/// Rows of `[batch, kv_heads, k_len]` in parts, `[batch, kv_heads, parts, keys]`, zero-padded. A reduction gives a
/// row to few units, so the few long rows of a long sequence would leave most of a GPU idle.
fn in_parts(rows: Tensor<3>) -> Tensor<4> {
    let [batch, heads, k_len] = rows.dims();
    let keys = k_len.min(PART);
    let parts = k_len.div_ceil(keys);
    let rows = match parts * keys - k_len {
        0 => rows,
        behind => {
            let zeros = Tensor::zeros([batch, heads, behind], (&rows.device(), rows.dtype()));
            Tensor::cat(vec![rows, zeros], 2)
        }
    };
    rows.reshape([batch, heads, parts, keys])
}

/// The sums of rows in parts, `[batch, kv_heads, 1, 1]`.
fn sums(parts: Tensor<4>) -> Tensor<4> {
    parts.sum_dim(2).sum_dim(3)
}

/// The sum of each row of `[batch, kv_heads, k_len]`: `[batch, kv_heads, 1]`.
pub(crate) fn row_sums(rows: Tensor<3>) -> Tensor<3> {
    sums(in_parts(rows)).squeeze_dim(3)
}

/// Share of each key in its head's total, [in parts](in_parts), f32: the positions at which its rank keeps it or it
/// is a runner-up (negative counts as 0), divided by their sum over all keys.
fn shares(positions: Tensor<3, Int>) -> Tensor<4> {
    let positions = in_parts(positions.clamp_min(0).cast(FloatDType::F32));
    let all = sums(positions.clone());
    // A head without candidates has nothing to centre.
    let none = all.clone().equal_elem(0);
    positions / all.mask_fill(none, 1)
}

/// A rank whose gradient is that of `rank` minus its share of the sum. Only the gradient of the result is used.
pub(crate) fn charged(rank: Tensor<3>, shares: Option<Tensor<4>>) -> Tensor<3> {
    let Some(shares) = shares else { return rank };
    let [batch, heads, k_len] = rank.dims();
    let rank = in_parts(rank);
    let [_, _, parts, keys] = rank.dims();
    // So that its gradient, a sum over all keys, is one over parts, too.
    let charge = sums(rank.clone() * shares).expand([batch, heads, 1, keys]);
    let charged = (rank - charge).reshape([batch, heads, parts * keys]);
    charged.narrow(2, 0, k_len)
}

twin! {
    /// Selects exactly the `window` highest scored visible keys of each query, as one interval per key: the short
    /// form of [`Selector::top`](crate::Selector::top). For `scores` see
    /// [`Selector::select`](crate::Selector::select); `window >= k_len` keeps every key.
    pub fn select(scores: Tensor<3>, window: usize) -> Intervals = try_select;
}

/// Like [`select`], but returns the error.
///
/// # Errors
///
/// [`AttentionError::ZeroWindow`], [`AttentionError::ElementType`], [`AttentionError::TooLarge`] or
/// [`AttentionError::NoEngine`].
pub fn try_select(scores: Tensor<3>, window: usize) -> Result<Intervals, AttentionError> {
    Selector::top(window).try_select(scores)
}
