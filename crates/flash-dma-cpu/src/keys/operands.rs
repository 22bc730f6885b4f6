//! Operands of a pass: the queries, and the source of their keys.

use crate::args::{Inputs, MaskedInputs};
use crate::element::Element;
use crate::keys::bias::Bias;
use crate::keys::intervals::{Ranked, RankedPositions};
use crate::queries::KvHead;
use crate::tile_plan::MaskBits;
use crate::view::View;
use flash_dma_problem::{Interval, MaskedProblem, Problem};

/// The checked inputs of a pass.
pub(crate) struct Operands<'a, E, R> {
    pub(crate) problem: &'a Problem,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub(crate) q: View<'a, E, 4>,
    pub(crate) rows: R,
    pub(crate) source: KeySource<'a>,
    /// `None` adds nothing to the logits.
    pub(crate) bias: Option<Bias<'a>>,
}

/// Access to the rows of K and V in any layout. `key` is an index below the problem's `k_len`.
pub(crate) trait KeyRows<E>: Sync {
    /// The row of K, and that of V.
    fn rows(&self, head: KvHead, key: usize) -> [&[E]; 2];
}

pub(crate) enum KeySource<'a> {
    /// All keys up to the query's position.
    All,
    /// The keys whose interval contains the query's position; contiguous `[batch, kv_heads, k_len]`.
    Intervals(&'a [Interval]),
    Ranked(Ranked<'a>),
    /// The keys that a mask's tile plan shows, up to the query's position.
    Planned(MaskBits<'a>),
}

pub(crate) struct KeyTensors<'a, E> {
    k: View<'a, E, 4>,
    v: View<'a, E, 4>,
}

impl<E: Element> KeyRows<E> for KeyTensors<'_, E> {
    #[inline]
    fn rows(&self, KvHead { batch, head }: KvHead, key: usize) -> [&[E]; 2] {
        [self.k.row(batch, head, key), self.v.row(batch, head, key)]
    }
}

impl<'a, E: Element> Operands<'a, E, KeyTensors<'a, E>> {
    pub(crate) fn scored(problem: &'a Problem, inputs: &Inputs<'a, E>) -> Self {
        let &Inputs { q, k, v, selection } = inputs;
        Self {
            problem,
            q,
            rows: KeyTensors { k, v },
            source: selection.map_or(KeySource::All, |s| KeySource::Intervals(s.intervals)),
            bias: selection.map(|s| Bias::of_scores(&s.scores, problem.group())),
        }
    }

    /// The keys of the inputs' selection whose ranks learn.
    pub(crate) fn ranked(
        problem: &'a Problem,
        inputs: &Inputs<'a, E>,
        positions: RankedPositions<'a>,
    ) -> Self {
        let selection = inputs.selection.expect("a rank comes with it");
        Self {
            source: KeySource::Ranked(Ranked {
                intervals: selection.intervals,
                positions,
                scores: selection.scores,
            }),
            ..Self::scored(problem, inputs)
        }
    }

    pub(crate) fn masked(problem: &'a MaskedProblem, inputs: &MaskedInputs<'a, E>) -> Self {
        let (k, v) = (inputs.k, inputs.v);
        let bias = |bias| Bias::of_tensor(bias, problem.heads_each(bias.shape[1]));
        Self {
            problem: &problem.attention,
            q: inputs.q,
            rows: KeyTensors { k, v },
            source: KeySource::Planned(MaskBits::new(problem, inputs.bits)),
            bias: inputs.bias.as_ref().map(bias),
        }
    }
}
