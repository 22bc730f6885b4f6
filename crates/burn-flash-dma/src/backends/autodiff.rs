//! The gradients: one fused backward pass for whichever of q, k, v and scores are tracked.

use crate::ops::{AttentionGrads, DynamicMaskOps, OptionalFloat, Saved, Selection};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{AutodiffBackend, TensorMetadata};
use flash_dma_problem::Problem;
use std::sync::{Arc, Mutex};

impl<B: DynamicMaskOps, C: CheckpointStrategy> DynamicMaskOps for Autodiff<B, C> {
    fn dynamic_mask_select(scores: FloatTensor<Self>, window: usize) -> IntTensor<Self> {
        // The selection is a constant.
        B::dynamic_mask_select(scores.into_primitive(), window)
    }

    fn dynamic_mask_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match selection {
            Selection::All => run::<B, C, 3>([q, k, v], None, problem, false),
            Selection::Scored { scores, intervals } => {
                run::<B, C, 4>([q, k, v, scores], Some(intervals), problem, false)
            }
        }
    }

    fn dynamic_mask_forward_with_lse(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match selection {
            Selection::All => run::<B, C, 3>([q, k, v], None, problem, true),
            Selection::Scored { scores, intervals } => {
                run::<B, C, 4>([q, k, v, scores], Some(intervals), problem, true)
            }
        }
    }

    fn dynamic_mask_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        saved: Saved<Self>,
        problem: Problem,
    ) -> AttentionGrads<Self> {
        let selection = match selection {
            Selection::All => Selection::All,
            Selection::Scored { scores, intervals } => Selection::Scored {
                scores: scores.into_primitive(),
                intervals,
            },
        };
        let saved = Saved {
            out: saved.out.into_primitive(),
            lse: saved.lse.into_primitive(),
            grad_out: saved.grad_out.into_primitive(),
            grad_lse: match saved.grad_lse {
                OptionalFloat::None => OptionalFloat::None,
                OptionalFloat::Some(t) => OptionalFloat::Some(t.into_primitive()),
            },
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
            scores: match grads.scores {
                OptionalFloat::None => OptionalFloat::None,
                OptionalFloat::Some(t) => OptionalFloat::Some(Self::from_inner(t)),
            },
        }
    }
}

/// A tensor of the graph.
type Recorded<B, C> = FloatTensor<Autodiff<B, C>>;

/// The forward pass, recorded. `inputs` are q, k, v and, with intervals, the scores.
///
/// Burn's graph has no node with two outputs. Where `lse` must be differentiable it is the node
/// with the inputs as parents, and `out` a node on top of it, whose backward step runs first and
/// leaves its gradient in a slot that both share. So there is still one backward pass.
fn run<B: DynamicMaskOps, C: CheckpointStrategy, const N: usize>(
    inputs: [Recorded<B, C>; N],
    intervals: Option<IntTensor<B>>,
    problem: Problem,
    differentiable_lse: bool,
) -> (Recorded<B, C>, Recorded<B, C>) {
    let nodes = inputs.each_ref().map(|t| t.node());
    match AttentionNode.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::UnTracked(prep) => {
            let (out, lse) =
                forward::<B, N>(inputs.map(|t| t.into_primitive()), intervals, problem);
            (prep.finish(out), Autodiff::<B, C>::from_inner(lse))
        }
        OpsKind::Tracked(mut prep) => {
            let checkpoints = inputs.each_ref().map(|t| prep.checkpoint(t));
            let inputs = inputs.map(|t| t.into_primitive());
            let (out, lse) = forward::<B, N>(inputs, intervals.clone(), problem);
            let slot = differentiable_lse.then(Slot::<B>::default);
            let state = State {
                inputs: checkpoints,
                intervals,
                out: out.clone(),
                lse: lse.clone(),
                grad_out: slot.clone(),
                problem,
            };
            let Some(slot) = slot else {
                return (prep.finish(state, out), Autodiff::<B, C>::from_inner(lse));
            };
            let tracked_lse = prep.finish(state, lse.clone());
            let prep = OutNode.prepare::<C>([tracked_lse.node()]);
            let out = match prep.compute_bound().stateful() {
                OpsKind::Tracked(prep) => prep.finish((slot, lse), out),
                OpsKind::UnTracked(prep) => prep.finish(out),
            };
            (out, tracked_lse)
        }
    }
}

fn forward<B: DynamicMaskOps, const N: usize>(
    inputs: [FloatTensor<B>; N],
    intervals: Option<IntTensor<B>>,
    problem: Problem,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (q, k, v, selection) = unpack(inputs, intervals);
    B::dynamic_mask_forward(q, k, v, selection, problem)
}

fn unpack<B: DynamicMaskOps, const N: usize>(
    inputs: [FloatTensor<B>; N],
    intervals: Option<IntTensor<B>>,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, Selection<B>) {
    let mut inputs = inputs.into_iter();
    let mut next = || inputs.next().expect("q, k, v and, with intervals, scores");
    let (q, k, v) = (next(), next(), next());
    let selection = match intervals {
        None => Selection::All,
        Some(intervals) => Selection::Scored {
            scores: next(),
            intervals,
        },
    };
    (q, k, v, selection)
}

/// The gradient of `out`, on its way from one node to the other.
type Slot<B> = Arc<Mutex<Option<FloatTensor<B>>>>;

/// What the backward pass keeps.
#[derive(Clone, Debug)]
struct State<B: DynamicMaskOps, const N: usize> {
    /// The checkpointed parents.
    inputs: [NodeId; N],
    intervals: Option<IntTensor<B>>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    /// Present if the node's own gradient is that of `lse`, and not that of `out`.
    grad_out: Option<Slot<B>>,
    problem: Problem,
}

/// The node whose parents are the inputs. It runs the backward pass.
#[derive(Debug)]
struct AttentionNode;

impl<B: DynamicMaskOps, const N: usize> Backward<B, N> for AttentionNode {
    type State = State<B, N>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let state = ops.state;
        let (grad_out, grad_lse) = match state.grad_out {
            None => (grad, OptionalFloat::None),
            Some(slot) => {
                let grad_out = slot
                    .lock()
                    .expect("no step panics with the lock held")
                    .take();
                // The loss may depend on `lse` alone: then the node of `out` never ran.
                let grad_out = grad_out.unwrap_or_else(|| zeros_like::<B>(&state.out));
                (grad_out, OptionalFloat::Some(grad))
            }
        };
        let inputs = state
            .inputs
            .map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let (q, k, v, selection) = unpack::<B, N>(inputs, state.intervals);
        let saved = Saved {
            out: state.out,
            lse: state.lse,
            grad_out,
            grad_lse,
        };
        let result = B::dynamic_mask_backward(q, k, v, selection, saved, state.problem);
        let scores = match result.scores {
            OptionalFloat::None => None,
            OptionalFloat::Some(t) => Some(t),
        };
        let results = [Some(result.q), Some(result.k), Some(result.v), scores];
        for (parent, grad) in ops.parents.into_iter().zip(results) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// The node of `out` on top of a differentiable `lse`: hands its gradient over.
#[derive(Debug)]
struct OutNode;

impl<B: DynamicMaskOps> Backward<B, 1> for OutNode {
    /// Where the gradient goes, and the `lse` for the shape of its zeros.
    type State = (Slot<B>, FloatTensor<B>);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let (slot, lse) = ops.state;
        *slot.lock().expect("no step panics with the lock held") = Some(grad);
        let [parent] = ops.parents;
        if let Some(parent) = parent {
            // The parent's step runs next and must find a gradient, whatever the loss uses.
            grads.register::<B>(parent.id, zeros_like::<B>(&lse));
        }
    }
}

fn zeros_like<B: DynamicMaskOps>(tensor: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_zeros(tensor.shape(), &tensor.device(), tensor.dtype().into())
}
