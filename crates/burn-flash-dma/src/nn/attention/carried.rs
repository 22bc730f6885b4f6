//! A pass over a part of a sequence, behind what earlier parts left to it.

use super::DynamicMaskAttention;
use crate::functions::attention::Attention;
use crate::functions::live::{LiveKeys, ranked_positions};
use crate::functions::selection::Intervals;
use crate::functions::selector::Selector;
use crate::nn::by_position::First;
use crate::nn::heads::{Starts, merge};
use crate::nn::scorer::Learns;
use burn::tensor::{DType, Int, Tensor};
use flash_dma_problem::{AttentionError, ScoreRole, SelectionRule};

/// What a layer's later tokens need of all earlier ones of their sequence: the keys that they can still attend to or have as
/// runners-up, however many came before. Every other key is behind `window` better ones, and stays there.
#[derive(Clone, Debug)]
pub(crate) struct Carry {
    /// Keys and values, `[batch, kv_heads, rows, head_dim]`, in the order of the tokens. Rows without a key come first.
    pub(crate) rows: [Tensor<4>; 2],
    /// What ranks them, `[batch, kv_heads, rows]`, f32: −∞ of a hidden key and of a row without one, ∞ of a sink.
    pub(crate) ranks: Tensor<3>,
    /// Tokens so far.
    pub(crate) seen: usize,
}

/// What a first pass over a part selects, for a second one.
#[derive(Clone, Debug)]
pub(crate) struct PartSelection {
    intervals: Intervals,
    /// The keys, those of the carry first, that go on.
    live: LiveKeys,
}

/// A layer's pass over a part of a sequence.
pub(crate) struct PartPass {
    pub(crate) selection: PartSelection,
    /// Keys and values of the part, with their graph.
    pub(crate) rows: [Tensor<4>; 2],
    pub(crate) ranks: Option<PartRanks>,
}

/// Ranks that learn.
pub(crate) struct PartRanks {
    /// The layer's tokens of the part.
    pub(crate) tokens: Tensor<3>,
    /// What ranks all keys, those of the carry first: a leaf.
    pub(crate) all: Tensor<3>,
    /// Positions of this part at which each of them learns, f32.
    pub(crate) positions: Tensor<3>,
}

impl PartSelection {
    pub(crate) fn live(&self) -> &LiveKeys {
        &self.live
    }
}

impl DynamicMaskAttention {
    /// An empty carry for tokens like these. Refuses layers whose memory of earlier tokens has no bound, or that such a pass
    /// does not support.
    pub(crate) fn try_carry(&self, x: &Tensor<3>) -> Result<Carry, AttentionError> {
        self.check_tokens(x)?;
        let refused = match (self.options.keep_window, self.score_role()) {
            (None, _) => "keeps all keys",
            _ if !self.options.causal => "is not causal",
            _ if self.options.alibi.is_some() => "has ALiBi",
            _ if self.dropout.is_some() => "has dropout",
            (_, ScoreRole::RankAndBias) => "adds scores to the logits",
            _ if self.learning.tokens => "has tokens that learn through their scores",
            (Some(window), ScoreRole::Rank) => {
                let [heads, dim] = [self.n_kv_heads, self.head_dim];
                let (_, rows, _) = self.carried(window);
                let device = &x.device().without_autodiff();
                let [batch, _, _] = x.dims();
                let options = (device, x.dtype());
                let zeros = || Tensor::zeros([batch, heads, rows, dim], options);
                let ranks = [batch, heads, rows];
                return Ok(Carry {
                    rows: [zeros(), zeros()],
                    ranks: Tensor::full(ranks, f32::NEG_INFINITY, (device, DType::F32)),
                    seen: 0,
                });
            }
        };
        let what = format!("a sequence in parts by a layer that {refused}");
        Err(AttentionError::Unsupported { what })
    }

    /// The rule, the rows of a carry, and what learns through the scores.
    fn carried(&self, window: usize) -> (SelectionRule, usize, Learns) {
        let learns = self.learning.in_training(self.kind, Some(window));
        let runners_up = match learns {
            Learns::Nothing => 0,
            _ => self.learning.runners_up(window),
        };
        (self.rule(window), window + runners_up, learns)
    }

    /// Attention of tokens `[batch, len, d_model]` behind a carry: the output, the carry after them, as a constant, and the
    /// pass. The rows of `carry` may be leaves of autodiff. A second pass gets the first one's selection.
    pub(crate) fn try_forward_part(
        &self,
        x: Tensor<3>,
        carry: &Carry,
        given: Option<&PartSelection>,
    ) -> Result<(Tensor<3>, Carry, PartPass), AttentionError> {
        self.check_tokens(&x)?;
        let window = self.options.keep_window.expect("a carry has a window");
        let (rule, rows, learns) = self.carried(window);
        let [_, len, _] = x.dims();
        let has_graph = x.device().is_autodiff();
        let [q, k, v] = self.project(x.clone(), Starts::Positions(&[carry.seen]))?;
        let x = x.without_autodiff();
        let ranks = self.ranks_of_part(&x, &v, carry, rule, learns)?;
        let is_tracked = has_graph && learns != Learns::Nothing;
        let all = match is_tracked {
            true => ranks.clone().autodiff().set_require_grad(true),
            false => ranks.clone(),
        };
        let selection = match given {
            Some(given) => given.clone(),
            None => {
                let intervals = self.part_selector(window, rule).try_select(all.clone())?;
                let live = LiveKeys::new(last_ends(&intervals), rule.recent, rows);
                PartSelection { intervals, live }
            }
        };
        let intervals = selection.intervals.clone().ranked_by(&all);
        let [keys, values] = [(0, &k), (1, &v)]
            .map(|(at, part)| Tensor::cat(vec![carry.rows[at].clone(), part.clone()], 2));
        let live = &selection.live;
        let next = Carry {
            rows: [&keys, &values].map(|keys| live.rows_of(keys.clone().without_autodiff())),
            ranks: live.numbers_of(ranks.clone(), f32::NEG_INFINITY),
            seen: carry.seen + len,
        };
        let ranks = is_tracked.then(|| {
            let positions = ranked_positions(last_ends(&intervals), rule.recent, rows);
            let sinks = ranks.equal_elem(f32::INFINITY);
            PartRanks {
                tokens: x,
                all,
                positions: positions.mask_fill(sinks, 0),
            }
        });
        let attention = Attention::new(q, keys, values).options(self.options);
        let out = self.with_sink(attention.intervals(&intervals))?;
        let selection = PartSelection {
            intervals: selection.intervals.ranked_by(&next.ranks),
            ..selection
        };
        let pass = PartPass {
            selection,
            rows: [k, v],
            ranks,
        };
        Ok((merge(out, &self.o_proj)?, next, pass))
    }

    /// What ranks the keys of a carry and of the part behind it: without a graph. Scores are made again for their gradient, which
    /// is known after the backward pass of the part.
    fn ranks_of_part(
        &self,
        x: &Tensor<3>,
        v: &Tensor<4>,
        carry: &Carry,
        rule: SelectionRule,
        learns: Learns,
    ) -> Result<Tensor<3>, AttentionError> {
        let [batch, len, _] = x.dims();
        let scores = match rule.ranked() > 0 || learns != Learns::Nothing {
            true => {
                let first = First::At(carry.seen);
                self.scores_from(x, first, Learns::Nothing, || Ok(v.clone()))?
            }
            false => Tensor::zeros([batch, self.n_kv_heads, len], (&x.device(), DType::F32)),
        };
        let ranks = scores.without_autodiff();
        let ranks = with_sinks(ranks, rule.sinks.saturating_sub(carry.seen));
        Ok(Tensor::cat(vec![carry.ranks.clone(), ranks], 2))
    }

    /// The selector of a part. Its sinks rank above all others already, and the charge of ranks that compete is known when all
    /// parts are done.
    fn part_selector(&self, window: usize, rule: SelectionRule) -> Selector {
        let selector = Selector::top(window).recent(rule.recent);
        self.learning.taught(selector, window).compete(false)
    }

    /// Scores by their projection alone, `[batch, kv_heads, len]`, of tokens `[batch, len, d_model]`.
    pub(crate) fn try_projected_scores(
        &self,
        tokens: Tensor<3>,
    ) -> Result<Tensor<3>, AttentionError> {
        let none = || unreachable!("scores that only rank are of tokens");
        let scorer = self.scorer();
        scorer.scores(self.score_role(), Learns::Projection, || tokens, none)
    }
}

/// Ends of the keys of intervals, runners-up included.
fn last_ends(intervals: &Intervals) -> Tensor<3, Int> {
    match intervals.runner_up_ends() {
        Some(ends) => ends.clone().without_autodiff(),
        None => {
            let ends = intervals.tensor().clone().without_autodiff();
            let ends = ends.narrow(3, 1, 1);
            let [batch, heads, keys, _] = ends.dims();
            ends.reshape([batch, heads, keys])
        }
    }
}

/// Ranks of which the first `sinks` are above all others, unless they are hidden.
fn with_sinks(ranks: Tensor<3>, sinks: usize) -> Tensor<3> {
    let [batch, heads, len] = ranks.dims();
    let sinks = sinks.min(len);
    if sinks == 0 {
        return ranks;
    }
    let first = ranks.clone().narrow(2, 0, sinks);
    let shown = first.clone().not_equal_elem(f32::NEG_INFINITY);
    let first = first.mask_fill(shown, f32::INFINITY);
    ranks.slice_assign([0..batch, 0..heads, 0..sinks], first)
}
