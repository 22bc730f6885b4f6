//! Where a pass takes its keys from.

use super::bias::Bias;
use super::intervals::{Ranked, RankedPositions};
use crate::args::{Inputs, MaskedInputs, Selection};
use crate::element::Element;
use crate::queries::KvHead;
use crate::tile_plan::MaskBits;
use crate::view::View;
use flash_dma_problem::{Interval, MaskedProblem, Problem};

/// The rows of K and V, wherever they lie. `key` is an index below the problem's `k_len`.
pub(crate) trait KeyRows<E>: Sync {
    /// The row of K, and that of V.
    fn rows(&self, head: KvHead, key: usize) -> [&[E]; 2];
}

/// Which keys a query attends to.
#[derive(Clone, Copy)]
pub(crate) enum KeySource<'a> {
    /// All keys up to the query's position.
    All,
    /// The keys whose interval contains the query's position; contiguous `[batch, kv_heads, k_len]`.
    Intervals(&'a [Interval]),
    /// The keys whose ranks learn at the query's position.
    Ranked(Ranked<'a>),
    /// The keys that a mask's tile plan shows, up to the query's position.
    Planned(MaskBits<'a>),
}

/// The keys of a pass.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a, R> {
    pub(crate) rows: R,
    pub(crate) source: KeySource<'a>,
    /// `None` adds nothing to the logits.
    pub(crate) bias: Option<Bias<'a>>,
}

/// K and V as tensors.
#[derive(Clone, Copy)]
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

impl<'a, E: Element> Keys<'a, KeyTensors<'a, E>> {
    pub(crate) fn scored(problem: &Problem, inputs: &Inputs<'a, E>) -> Self {
        let (k, v) = (inputs.k, inputs.v);
        Self {
            rows: KeyTensors { k, v },
            source: match inputs.selection {
                None => KeySource::All,
                Some(Selection { intervals, .. }) => KeySource::Intervals(intervals),
            },
            bias: (inputs.selection).map(|s| Bias::of_scores(&s.scores, problem.group())),
        }
    }

    /// Those of a selection whose ranks learn.
    pub(crate) fn ranked(
        problem: &Problem,
        inputs: &Inputs<'a, E>,
        selection: &Selection<'a>,
        positions: RankedPositions<'a>,
    ) -> Self {
        let (k, v) = (inputs.k, inputs.v);
        let ranked = Ranked {
            intervals: selection.intervals,
            positions,
            scores: selection.scores,
        };
        Self {
            rows: KeyTensors { k, v },
            source: KeySource::Ranked(ranked),
            bias: Some(Bias::of_scores(&selection.scores, problem.group())),
        }
    }

    pub(crate) fn masked(problem: &MaskedProblem, inputs: &MaskedInputs<'a, E>) -> Self {
        let (k, v) = (inputs.k, inputs.v);
        let bias = |bias| Bias::of_tensor(bias, problem.heads_each(bias.shape[1]));
        Self {
            rows: KeyTensors { k, v },
            source: KeySource::Planned(MaskBits::new(problem, inputs.bits)),
            bias: inputs.bias.as_ref().map(bias),
        }
    }
}
