//! The gradients: one fused backward pass for whichever of q, k, v, the scores and the rank are tracked.

use super::node::{Pass, constants, first_order, record};
use crate::ops::attention::DynamicMaskOps;
use crate::ops::types::{AttentionGrads, Forwarded, OptionalFloat, RunnersUp, Saved, Selection};
use burn::backend::AutodiffBackend;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use flash_dma_problem::{KeptKeys, Problem, TensorName};

impl<B: DynamicMaskOps, C: CheckpointStrategy> DynamicMaskOps for Autodiff<B, C> {
    fn dynamic_mask_select(scores: FloatTensor<Self>, kept: KeptKeys) -> IntTensor<Self> {
        // The selection is a constant.
        B::dynamic_mask_select(scores.into_primitive(), kept)
    }

    fn dynamic_mask_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        run::<B, C>([q, k, v], selection, problem, false)
    }

    fn dynamic_mask_forward_with_residual(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> Forwarded<Self> {
        let [q, k, v] = [q, k, v].map(|t| t.into_primitive());
        let selection = inner(selection);
        constants(B::dynamic_mask_forward_with_residual(
            q, k, v, selection, problem,
        ))
    }

    fn dynamic_mask_forward_with_lse(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        run::<B, C>([q, k, v], selection, problem, true)
    }

    fn dynamic_mask_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        saved: Saved<Self>,
        problem: Problem,
    ) -> AttentionGrads<Self> {
        first_order([
            (TensorName::Query, q.is_tracked()),
            (TensorName::Key, k.is_tracked()),
            (TensorName::Value, v.is_tracked()),
            (
                TensorName::Scores,
                matches!(&selection, Selection::Scored { scores, .. } if scores.is_tracked()),
            ),
            (TensorName::GradOut, saved.grad_out.is_tracked()),
            (
                TensorName::GradLse,
                matches!(&saved.grad_lse, OptionalFloat::Some(t) if t.is_tracked()),
            ),
        ]);
        let selection = inner(selection);
        let saved = Saved {
            out: saved.out.into_primitive(),
            residual: saved.residual.map(|t| t.into_primitive()),
            lse: saved.lse.into_primitive(),
            grad_out: saved.grad_out.into_primitive(),
            grad_lse: saved.grad_lse.map(|t| t.into_primitive()),
        };
        let grads = B::dynamic_mask_backward(
            q.into_primitive(),
            k.into_primitive(),
            v.into_primitive(),
            selection,
            saved,
            problem,
        );
        AttentionGrads {
            q: Self::from_inner(grads.q),
            k: Self::from_inner(grads.k),
            v: Self::from_inner(grads.v),
            scores: grads.scores.map(Self::from_inner),
            rank: grads.rank.map(Self::from_inner),
        }
    }
}

/// The selection off the graph.
fn inner<B: DynamicMaskOps, C: CheckpointStrategy>(
    selection: Selection<Autodiff<B, C>>,
) -> Selection<B> {
    match selection {
        Selection::All => Selection::All,
        Selection::Scored {
            scores,
            intervals,
            runners_up,
        } => Selection::Scored {
            scores: scores.into_primitive(),
            intervals,
            runners_up: match runners_up {
                RunnersUp::None => RunnersUp::None,
                RunnersUp::Some {
                    far,
                    max_live,
                    rank,
                } => RunnersUp::Some {
                    far,
                    max_live,
                    rank: rank.into_primitive(),
                },
            },
        },
    }
}

/// A tensor of the graph.
type Recorded<B, C> = FloatTensor<Autodiff<B, C>>;

fn run<B: DynamicMaskOps, C: CheckpointStrategy>(
    [q, k, v]: [Recorded<B, C>; 3],
    selection: Selection<Autodiff<B, C>>,
    problem: Problem,
    differentiable_lse: bool,
) -> (Recorded<B, C>, Recorded<B, C>) {
    match selection {
        Selection::All => {
            let pass = Selected {
                intervals: None,
                far: None,
                problem,
            };
            record::<B, C, _, 3>([q, k, v], pass, differentiable_lse)
        }
        Selection::Scored {
            scores,
            intervals,
            runners_up,
        } => {
            let mut pass = Selected {
                intervals: Some(intervals),
                far: None,
                problem,
            };
            match runners_up {
                RunnersUp::None => {
                    record::<B, C, _, 4>([q, k, v, scores], pass, differentiable_lse)
                }
                RunnersUp::Some {
                    far,
                    max_live,
                    rank,
                } => {
                    pass.far = Some((far, max_live));
                    record::<B, C, _, 5>([q, k, v, scores, rank], pass, differentiable_lse)
                }
            }
        }
    }
}

/// Dynamic-mask attention of q, k, v, with intervals the scores, and with runners-up the rank.
#[derive(Clone, Debug)]
struct Selected<B: DynamicMaskOps> {
    intervals: Option<IntTensor<B>>,
    /// The ends of the runners-up, whose gradient is that of the rank; it may be the tensor of the scores, which then
    /// gets both. With the most keys that are alive at one position until then.
    far: Option<(IntTensor<B>, usize)>,
    problem: Problem,
}

impl<B: DynamicMaskOps, const N: usize> Pass<B, N> for Selected<B> {
    fn forward(&self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, FloatTensor<B>) {
        let (q, k, v, selection) = unpack(inputs, self.intervals.clone(), None);
        B::dynamic_mask_forward(q, k, v, selection, self.problem)
    }

    fn forward_with_residual(&self, inputs: [FloatTensor<B>; N]) -> Forwarded<B> {
        let (q, k, v, selection) = unpack(inputs, self.intervals.clone(), None);
        B::dynamic_mask_forward_with_residual(q, k, v, selection, self.problem)
    }

    fn backward(
        self,
        inputs: [FloatTensor<B>; N],
        saved: Saved<B>,
        tracked: [bool; N],
    ) -> [Option<FloatTensor<B>>; N] {
        // Of a constant rank nothing is added up.
        let far = self.far.filter(|_| tracked.get(RANK) == Some(&true));
        let (q, k, v, selection) = unpack(inputs, self.intervals, far);
        let grads = B::dynamic_mask_backward(q, k, v, selection, saved, self.problem);
        let [scores, rank] = [grads.scores, grads.rank].map(OptionalFloat::into_option);
        let mut grads = [Some(grads.q), Some(grads.k), Some(grads.v), scores, rank].into_iter();
        std::array::from_fn(|_| grads.next().flatten())
    }
}

/// The place of the rank among the inputs.
const RANK: usize = 4;

fn unpack<B: DynamicMaskOps, const N: usize>(
    inputs: [FloatTensor<B>; N],
    intervals: Option<IntTensor<B>>,
    far: Option<(IntTensor<B>, usize)>,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, Selection<B>) {
    let mut inputs = inputs.into_iter();
    let mut next = || inputs.next().expect("q, k, v, then scores, then the rank");
    let (q, k, v) = (next(), next(), next());
    let selection = match intervals {
        None => Selection::All,
        Some(intervals) => Selection::Scored {
            scores: next(),
            intervals,
            runners_up: match far {
                None => RunnersUp::None,
                Some((far, max_live)) => RunnersUp::Some {
                    far,
                    max_live,
                    rank: next(),
                },
            },
        },
    };
    (q, k, v, selection)
}
