//! Gradients of a training step's own operations.

use super::handed::record_parts;
use super::recomputed;
use crate::fallback::tensors::cast;
use crate::fallback::training as fallback;
use crate::ops::training::{LinearLosses, TrainingOps};
use crate::types::PackedRows;
use crate::validate::checked_element;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};
use flash_dma_problem::ElementType;

impl<B: TrainingOps, C: CheckpointStrategy> TrainingOps for Autodiff<B, C> {
    fn training_lookup(
        weight: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let [vocabulary, _] = weight.shape().dims();
        let weight_dtype = weight.dtype().into();
        let prepared = Lookup.prepare::<C>([weight.node()]).compute_bound();
        let rows = B::training_lookup(weight.into_primitive(), tokens.clone(), dtype);
        match prepared.stateful() {
            OpsKind::UnTracked(prep) => prep.finish(rows),
            OpsKind::Tracked(prep) => prep.finish((tokens, vocabulary, weight_dtype), rows),
        }
    }

    fn training_losses(logits: FloatTensor<Self>, targets: IntTensor<Self>) -> FloatTensor<Self> {
        let prepared = Losses.prepare::<C>([logits.node()]).compute_bound();
        match prepared.stateful() {
            OpsKind::UnTracked(prep) => {
                prep.finish(B::training_losses(logits.into_primitive(), targets))
            }
            OpsKind::Tracked(mut prep) => {
                let kept = prep.checkpoint(&logits);
                let logits = logits.into_primitive();
                let (losses, normaliser) = B::training_losses_normalised(logits, targets.clone());
                prep.finish((kept, targets, normaliser), losses)
            }
        }
    }

    fn training_linear_losses(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        weights: FloatTensor<Self>,
        rows: usize,
        by_rows: bool,
    ) -> FloatTensor<Self> {
        let tracked = [x.is_tracked(), weight.is_tracked()];
        let dtype = weight.dtype().into();
        let node = LinearLossesNode.prepare::<C>([x.node(), weight.node()]);
        let operands = LinearLosses::<B> {
            x: x.into_primitive(),
            weight: weight.into_primitive(),
            by_rows,
            targets,
            weights: weights.into_primitive(),
        };
        match node.compute_bound().stateful() {
            OpsKind::UnTracked(prep) => prep.finish(operands.sum(rows, [false; 2]).0),
            OpsKind::Tracked(prep) => {
                let (sum, gradients) = operands.sum(rows, tracked);
                prep.finish((gradients, by_rows, dtype), sum)
            }
        }
    }

    fn training_resume(
        output: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let prepared = Resume.prepare::<C>([output.node()]).compute_bound();
        let gradient = gradient.into_primitive();
        let zero = B::training_resume(output.into_primitive(), gradient.clone());
        match prepared.stateful() {
            OpsKind::UnTracked(prep) => prep.finish(zero),
            OpsKind::Tracked(prep) => prep.finish(gradient, zero),
        }
    }

    fn training_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let forward = |[gate, up]: [_; 2]| B::training_swiglu(gate, up);
        recomputed::record(SwiGlu, [gate, up], forward, |keep| keep())
    }

    fn training_swiglu_product(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        weight: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let inputs = [gate, up, weight];
        let forward = |inputs: [FloatTensor<Self>; 3]| {
            let [gate, up, weight] = inputs.map(|tensor| tensor.into_primitive());
            B::training_swiglu_product(gate, up, weight)
        };
        let nodes = inputs.each_ref().map(|tensor| tensor.node());
        match SwiGluProduct.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::UnTracked(prep) => prep.finish(forward(inputs)),
            OpsKind::Tracked(mut prep) => {
                let element = checked_element(inputs[2].dtype());
                let kept = inputs.each_ref().map(|tensor| prep.checkpoint(tensor));
                prep.finish((kept, element), forward(inputs))
            }
        }
    }

    fn training_split(
        x: FloatTensor<Self>,
        dim: usize,
        sizes: Vec<usize>,
    ) -> Vec<FloatTensor<Self>> {
        let parts = B::training_split(x.primitive().clone(), dim, sizes);
        let are_heads = dim == 2 && x.shape().num_dims() == 4 && matches!(parts.len(), 2 | 3);
        let join = match are_heads {
            true => |parts, _| B::training_join_heads(PackedRows::from_parts(parts)),
            false => B::float_cat,
        };
        record_parts::<B, C>(x, parts, join, dim)
    }

    fn training_widen(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = x.dtype().into();
        let forward = move |[x]: [_; 1]| B::training_widen(x);
        recomputed::record(Widen, [x], forward, |_| dtype)
    }

    fn training_scores(
        tokens: FloatTensor<Self>,
        directions: FloatTensor<Self>,
        tokens_learn: bool,
    ) -> FloatTensor<Self> {
        let forward = |[tokens, directions]: [FloatTensor<Self>; 2]| {
            let [tokens, directions] = [tokens, directions].map(|t| t.into_primitive());
            B::training_scores(tokens, directions, tokens_learn)
        };
        // Tokens in the graph may be computed again for the backward pass, where a constant would be kept.
        let nodes = [tokens.node(), directions.node()];
        match Scores.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::UnTracked(prep) => prep.finish(forward([tokens, directions])),
            OpsKind::Tracked(mut prep) => {
                let kept = prep.checkpoint(&tokens);
                let teach = tokens_learn.then(|| prep.checkpoint(&directions));
                prep.finish((kept, teach), forward([tokens, directions]))
            }
        }
    }
}

#[derive(Debug)]
struct Lookup;

impl<B: TrainingOps> Backward<B, 1> for Lookup {
    /// Tokens, size of the vocabulary, and type of the table.
    type State = (IntTensor<B>, usize, FloatDType);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (tokens, vocabulary, dtype) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |gradient| {
            let table = B::training_lookup_gradient(gradient, tokens, vocabulary);
            B::float_cast(table, dtype)
        });
    }
}

#[derive(Debug)]
struct Losses;

impl<B: TrainingOps> Backward<B, 1> for Losses {
    /// Logits, targets, and the normaliser of the logits.
    type State = (NodeId, IntTensor<B>, FloatTensor<B>);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let (logits, targets, normaliser) = ops.state;
        let logits = checkpointer.retrieve_node_output::<FloatTensor<B>>(logits);
        unary::<B, _>(ops.parents, ops.node, grads, |gradient| {
            B::training_losses_gradient(logits, targets, normaliser, gradient)
        });
    }
}

#[derive(Debug)]
struct LinearLossesNode;

impl<B: TrainingOps> Backward<B, 2> for LinearLossesNode {
    /// Gradients of the features and of the weight, for a gradient of 1; whether the latter is that of its transpose; and the
    /// weight's type.
    type State = ([Option<FloatTensor<B>>; 2], bool, FloatDType);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let factor = grads.consume::<B>(&ops.node);
        let ([of_x, of_weight], by_rows, dtype) = ops.state;
        let scaled = |gradient| B::training_scale(gradient, factor.clone());
        let of_weight = of_weight.map(|gradient| {
            let gradient = cast::<B>(scaled(gradient), dtype);
            match by_rows {
                true => B::float_swap_dims(gradient, 0, 1),
                false => gradient,
            }
        });
        for (parent, gradient) in ops.parents.into_iter().zip([of_x.map(scaled), of_weight]) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

#[derive(Debug)]
struct SwiGlu;

impl<B: TrainingOps> Backward<B, 2> for SwiGlu {
    /// The gate and the factor that it gates.
    type State = [NodeId; 2];

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let gradient = grads.consume::<B>(&ops.node);
        let [gate, up] =
            (ops.state).map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let (of_gate, of_up, _) = B::training_swiglu_backward(gate, up, gradient, false);
        for (parent, gradient) in ops.parents.into_iter().zip([of_gate, of_up]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

#[derive(Debug)]
struct SwiGluProduct;

impl<B: TrainingOps> Backward<B, 3> for SwiGluProduct {
    /// The gate, the factor that it gates and the weight; and the weight's type.
    type State = ([NodeId; 3], ElementType);

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let gradient = grads.consume::<B>(&ops.node);
        let (nodes, element) = ops.state;
        let [gate, up, weight] =
            nodes.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let [of_gate, of_up, of_weight] = ops.parents;
        let hidden = if of_gate.is_some() || of_up.is_some() {
            let of_hidden = B::linear_product_input_gradient(gradient.clone(), weight);
            let (gate, up, hidden) =
                B::training_swiglu_backward(gate, up, of_hidden, of_weight.is_some());
            for (parent, gradient) in [(of_gate, gate), (of_up, up)] {
                if let Some(parent) = parent {
                    grads.register::<B>(parent.id, gradient);
                }
            }
            hidden.into_option()
        } else {
            Some(B::training_swiglu(gate, up))
        };
        if let (Some(parent), Some(hidden)) = (of_weight, hidden) {
            let gradient = B::linear_product_weight_gradient(hidden, gradient, element);
            grads.register::<B>(parent.id, gradient);
        }
    }
}

#[derive(Debug)]
struct Widen;

impl<B: Backend> Backward<B, 1> for Widen {
    /// Type of the input.
    type State = FloatDType;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        unary::<B, _>(ops.parents, ops.node, grads, |gradient| {
            B::float_cast(gradient, ops.state)
        });
    }
}

#[derive(Debug)]
struct Scores;

impl<B: TrainingOps> Backward<B, 2> for Scores {
    /// The tokens, and the directions if the tokens learn.
    type State = (NodeId, Option<NodeId>);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let gradient = grads.consume::<B>(&ops.node);
        let mut kept = |id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id);
        let (tokens, directions) = ops.state;
        let (tokens, directions) = (kept(tokens), directions.map(kept));
        let [of_tokens, of_directions] = ops.parents;
        if let Some(parent) = of_tokens {
            let of_tokens = match directions {
                Some(directions) => {
                    fallback::scores_token_gradient::<B>(&tokens, directions, gradient.clone())
                }
                // There may be no other gradient. A view of one token's zeros is added to one in vectors.
                None => {
                    let [_, _, width] = tokens.shape().dims();
                    let zeros = Shape::new([1, 1, width]);
                    let zeros = B::float_zeros(zeros, &tokens.device(), tokens.dtype().into());
                    B::float_expand(zeros, tokens.shape())
                }
            };
            grads.register::<B>(parent.id, of_tokens);
        }
        if let Some(parent) = of_directions {
            grads.register::<B>(parent.id, B::training_scores_gradient(tokens, gradient));
        }
    }
}

#[derive(Debug)]
struct Resume;

impl<B: Backend> Backward<B, 1> for Resume {
    /// The gradient to continue with.
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        // The node's own gradient is that of a zero.
        unary::<B, _>(ops.parents, ops.node, grads, |_| ops.state);
    }
}
