//! A pass over a part of a sequence, behind what earlier parts left to it.

use super::DynamicMaskAttention;
use crate::documents::Documents;
use crate::fallback::tensors::ints;
use crate::functions::attention::Attention;
use crate::functions::live::{LiveKeys, ranked_positions};
use crate::functions::selection::Intervals;
use crate::functions::selector::Selector;
use crate::nn::by_position::First;
use crate::nn::heads::{Starts, merge};
use crate::nn::scorer::Learns;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use flash_dma_problem::{AttentionError, ScoreRole, SelectionRule};
use std::ops::Range;

/// The rows that a layer's later tokens need of all earlier ones of their sequence: the keys that they can still attend to or have as
/// runners-up, however many came before. Every other key is behind `window` better ones, and stays there.
#[derive(Clone, Debug)]
pub(crate) struct Carry {
    /// Keys and values, `[batch, kv_heads, rows, head_dim]`, in the order of the tokens. Rows without a key come first.
    pub(crate) rows: [Tensor<4>; 2],
    /// Their ranks, `[batch, kv_heads, rows]`, f32: −∞ of a hidden key and of a row without one, ∞ of a sink.
    pub(crate) ranks: Tensor<3>,
    /// Tokens so far.
    pub(crate) seen: usize,
}

/// The documents of a part of a batch of sequences, which may begin before it and go on behind it.
#[derive(Clone, Debug)]
pub(crate) struct PartDocuments {
    /// First token of the part.
    start: usize,
    /// Tokens of the part.
    len: usize,
    /// The documents of each sequence that have a token in the part, as ranges of the whole sequence's tokens.
    spans: Vec<Vec<Range<usize>>>,
}

impl PartDocuments {
    /// Those of a part, of documents without padding.
    pub(crate) fn new(documents: &Documents, part: &Range<usize>) -> Self {
        let mut spans = vec![Vec::new(); documents.lengths().len()];
        for own in documents.all() {
            let span = own.start..own.start + own.len;
            if span.start < part.end && span.end > part.start {
                spans[own.sequence].push(span);
            }
        }
        Self {
            start: part.start,
            len: part.len(),
            spans,
        }
    }

    /// First token of the part.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// The documents of the rows of a carry and the part behind them: rows that no document of the part continues are one of
    /// their own.
    fn behind(&self, rows: usize) -> Documents {
        let end = self.start + self.len;
        Documents::from_lengths(self.spans.iter().map(|spans| {
            let mut lengths = vec![rows];
            for (nth, span) in spans.iter().enumerate() {
                let own = span.end.min(end) - span.start.max(self.start);
                // The rows in front of the first part are empty, whosever they are.
                let is_behind_rows = span.start < self.start || (self.start == 0 && nth == 0);
                match is_behind_rows {
                    true => lengths[0] += own,
                    false => lengths.push(own),
                }
            }
            lengths
        }))
    }

    /// First key, those of a carry counted first, of the document that goes on behind the part, `[batch, 1, 1]`; the number of keys
    /// if none does.
    fn open_from(&self, rows: usize, device: &Device) -> Tensor<3, Int> {
        let end = self.start + self.len;
        let from = self.spans.iter().map(|spans| match spans.last() {
            Some(span) if span.end > end && span.start < self.start => 0,
            Some(span) if span.end > end => rows + span.start - self.start,
            _ => rows + self.len,
        });
        let from = from.map(|from| from as i32).collect();
        ints(from, [self.spans.len(), 1, 1], device)
    }

    /// The tokens of the part that are among the first `sinks` of their document, `[batch, 1, len]`.
    fn sinks(&self, sinks: usize, device: &Device) -> Tensor<3, Bool> {
        let of = |spans: &Vec<Range<usize>>| {
            let mut is_sink = vec![false; self.len];
            for span in spans {
                let end = span.end.min(span.start + sinks).min(self.start + self.len);
                let places = span.start.max(self.start)..end.max(self.start);
                for place in places {
                    is_sink[place - self.start] = true;
                }
            }
            is_sink
        };
        let is_sink: Vec<bool> = self.spans.iter().flat_map(of).collect();
        let shape = [self.spans.len(), 1, self.len];
        Tensor::from_data(TensorData::new(is_sink, shape), device)
    }
}

/// Selection of a first pass over a part, for a second one.
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
    /// The selection, by which ranks learn.
    intervals: Intervals,
    /// Keys and values of the carry and the part, in this order.
    all: [Tensor<4>; 2],
    all_ranks: Tensor<3>,
    /// Tokens up to the end of the part.
    seen: usize,
}

impl PartPass {
    /// The carry behind the part, as a constant.
    pub(crate) fn next_carry(&self) -> Carry {
        let live = self.selection.live();
        let rows = |keys: &Tensor<4>| live.rows_of(keys.clone().without_autodiff());
        Carry {
            rows: self.all.each_ref().map(rows),
            ranks: live.numbers_of(self.all_ranks.clone(), f32::NEG_INFINITY),
            seen: self.seen,
        }
    }
}

/// Ranks that learn.
pub(crate) struct PartRanks {
    /// The layer's tokens of the part.
    pub(crate) tokens: Tensor<3>,
    /// Ranks of all keys, those of the carry first: a leaf.
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
    /// Refuses a layer that cannot read a sequence in parts (`train::try_in_parts`).
    ///
    /// # Errors
    ///
    /// [`AttentionError::Unsupported`] if the layer keeps all keys, is not causal, has ALiBi or dropout, adds scores to the
    /// logits, or its tokens learn through scores.
    pub fn check_in_parts(&self) -> Result<(), AttentionError> {
        let reasons = [
            (self.options.keep_window.is_none(), "keeps all keys"),
            (!self.options.causal, "is not causal"),
            (self.options.alibi.is_some(), "has ALiBi"),
            (self.dropout.is_some(), "has dropout"),
            (
                self.score_role() == ScoreRole::RankAndBias,
                "adds scores to the logits",
            ),
            (
                self.learning.tokens,
                "has tokens that learn through their scores",
            ),
        ];
        match reasons.into_iter().find(|&(is_so, _)| is_so) {
            None => Ok(()),
            Some((_, reason)) => Err(AttentionError::Unsupported {
                what: format!("a sequence in parts by a layer that {reason}"),
            }),
        }
    }

    /// The layer with a rotary table of one position, to be sent to a device: the device computes the angles of its part's
    /// positions, which takes less than to send it the table of all.
    #[must_use]
    pub fn without_rotary_table(&self) -> Self {
        let mut layer = self.clone();
        if let Some(rope) = &mut layer.rope {
            rope.freq_complex = rope.freq_complex.clone().narrow(0, 0, 1);
        }
        layer
    }

    /// An empty carry for tokens like these, of sequences of `len` tokens in all.
    pub(crate) fn try_carry(&self, x: &Tensor<3>, len: usize) -> Result<Carry, AttentionError> {
        self.check_tokens(x)?;
        self.check_in_parts()?;
        let window = self.options.keep_window.expect("it was checked");
        let runners_up = match self.part_learns(window) {
            Learns::Nothing => 0,
            _ => self.learning.runners_up(window),
        };
        let rows = window.saturating_add(runners_up).min(len);
        let device = &x.device().without_autodiff();
        let [batch, _, _] = x.dims();
        let ranks = [batch, self.n_kv_heads, rows];
        let shape = [batch, self.n_kv_heads, rows, self.head_dim];
        let zeros = || Tensor::zeros(shape, (device, x.dtype()));
        Ok(Carry {
            rows: [zeros(), zeros()],
            ranks: Tensor::full(ranks, f32::NEG_INFINITY, (device, DType::F32)),
            seen: 0,
        })
    }

    /// The parts that learn through the scores.
    fn part_learns(&self, window: usize) -> Learns {
        self.learning.in_training(self.kind, Some(window))
    }

    /// Queries, keys and values of tokens `[batch, len, d_model]`, which `seen` others come before.
    pub(crate) fn try_project_part(
        &self,
        x: &Tensor<3>,
        seen: usize,
    ) -> Result<[Tensor<4>; 3], AttentionError> {
        self.check_tokens(x)?;
        self.project(x.clone(), Starts::Positions(&[seen]))
    }

    /// Keys and values that the queries of a part attend to: those of its tokens `[batch, len, d_model]` behind a carry, whose rows may be
    /// leaves of autodiff. A second pass gets the first one's selection.
    pub(crate) fn try_select_part(
        &self,
        x: Tensor<3>,
        [k, v]: [Tensor<4>; 2],
        carry: &Carry,
        documents: &PartDocuments,
        given: Option<&PartSelection>,
    ) -> Result<PartPass, AttentionError> {
        let window = self.options.keep_window.expect("a carry has a window");
        let (rule, learns) = (self.rule(window), self.part_learns(window));
        let rows = carry.ranks.dims()[2];
        let [_, len, _] = x.dims();
        let has_graph = x.device().is_autodiff();
        let x = x.without_autodiff();
        let scores = self.scores_of_part(&x, &v, carry.seen, learns)?;
        let ranks = with_sinks(scores, documents, rule.sinks);
        let ranks = Tensor::cat(vec![carry.ranks.clone(), ranks], 2);
        // What learns is selected of ranks that autodiff tracks, with a graph or without.
        let tracked = match learns {
            Learns::Nothing => ranks.clone(),
            _ => ranks.clone().autodiff().set_require_grad(true),
        };
        let is_tracked = has_graph && learns != Learns::Nothing;
        let all = match is_tracked {
            true => tracked.clone(),
            false => ranks.clone(),
        };
        let selection = match given {
            Some(given) => given.clone(),
            None => {
                let selector = self.part_selector(window, rule);
                let selector = selector.documents(documents.behind(rows));
                let intervals = selector.try_select(tracked)?.for_last_queries();
                let from = documents.open_from(rows, &ranks.device());
                let live = LiveKeys::new(last_ends(&intervals), rule.recent, rows, Some(from));
                PartSelection { intervals, live }
            }
        };
        let intervals = selection.intervals.clone().ranked_by(&all);
        let [keys, values] = [(0, &k), (1, &v)]
            .map(|(at, part)| Tensor::cat(vec![carry.rows[at].clone(), part.clone()], 2));
        let learned = is_tracked.then(|| {
            let positions = ranked_positions(last_ends(&intervals), rule.recent, rows);
            let sinks = ranks.clone().equal_elem(f32::INFINITY);
            PartRanks {
                tokens: x,
                all,
                positions: positions.mask_fill(sinks, 0),
            }
        });
        let selection = PartSelection {
            intervals: selection.intervals.ranked_by(&carry.ranks),
            ..selection
        };
        Ok(PartPass {
            selection,
            rows: [k, v],
            ranks: learned,
            intervals,
            all: [keys, values],
            all_ranks: ranks,
            seen: carry.seen + len,
        })
    }

    /// Attention of the queries of a part, through the last projection: `[batch, len, d_model]`.
    pub(crate) fn try_attend_part(
        &self,
        q: Tensor<4>,
        pass: &PartPass,
    ) -> Result<Tensor<3>, AttentionError> {
        let [keys, values] = pass.all.clone();
        let attention = Attention::new(q, keys, values).options(self.options);
        let out = self.with_sink(attention.intervals(&pass.intervals))?;
        merge(out, &self.o_proj)
    }

    /// Scores of a part's tokens without a graph: they are made again for their gradient, which is known after the part's backward
    /// pass.
    fn scores_of_part(
        &self,
        x: &Tensor<3>,
        v: &Tensor<4>,
        first: usize,
        learns: Learns,
    ) -> Result<Tensor<3>, AttentionError> {
        let [batch, len, _] = x.dims();
        if self.ranking_window().is_none() && learns == Learns::Nothing {
            let shape = [batch, self.n_kv_heads, len];
            return Ok(Tensor::zeros(shape, (&x.device(), DType::F32)));
        }
        let scores = self.scores_from(x, First::At(first), Learns::Nothing, || Ok(v.clone()))?;
        Ok(scores.without_autodiff())
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

/// Ranks, `[batch, kv_heads, len]`, of which the first `sinks` of a document are above all others, unless they are hidden.
fn with_sinks(ranks: Tensor<3>, documents: &PartDocuments, sinks: usize) -> Tensor<3> {
    if sinks == 0 {
        return ranks;
    }
    let is_sink = documents.sinks(sinks, &ranks.device()).expand(ranks.dims());
    let is_shown = ranks.clone().not_equal_elem(f32::NEG_INFINITY);
    ranks.mask_fill(is_sink.bool_and(is_shown), f32::INFINITY)
}
