//! Gradients of norms and rotary encoding: nodes that keep their inputs, which the backward pass reads anyway, and
//! recompute their outputs.

use super::handed::{HandedGradient, Handing, handed};
use super::node::first_order;
use super::recomputed;
use crate::ops::norm::NormOps;
use crate::types::{NormGrads, Normed, OptionalFloat};
use burn::backend::AutodiffBackend;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use flash_dma_problem::{NormProblem, TensorName};

impl<B: NormOps, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
    fn rms_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        problem: NormProblem,
    ) -> FloatTensor<Self> {
        let norm = move |[x, gamma]: [_; 2]| B::rms_norm(x, gamma, problem);
        recomputed::record(RmsNormNode, [x, gamma], norm, |keep| (keep(), problem))
    }

    fn rms_norm_branch(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        problem: NormProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let node = BranchNode.prepare::<C>([x.node(), gamma.node()]);
        let mut prep = match node.compute_bound().stateful() {
            OpsKind::UnTracked(_) => {
                let (x, normed) =
                    B::rms_norm_branch(x.into_primitive(), gamma.into_primitive(), problem);
                return (Self::from_inner(x), Self::from_inner(normed));
            }
            OpsKind::Tracked(prep) => prep,
        };
        let branch = Branch {
            inputs: [prep.checkpoint(&x), prep.checkpoint(&gamma)],
            gradients: [HandedGradient::new(), HandedGradient::new()],
            problem,
        };
        let gradients = branch.gradients.clone();
        let gamma = gamma.into_primitive();
        let whole = prep.finish(branch, x.into_primitive());
        let skip = handed::<B, C>(&whole, whole.primitive().clone(), gradients[0].clone());
        let norm = move |[x]: [_; 1]| B::rms_norm(x, gamma.clone(), problem);
        let normed = recomputed::record(Handing, [whole], norm, |_| gradients[1].clone());
        (skip, normed)
    }

    fn rms_norm_backward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        grad_out: FloatTensor<Self>,
        problem: NormProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        first_order([
            (TensorName::Tokens, x.is_tracked()),
            (TensorName::NormWeight, gamma.is_tracked()),
            (TensorName::GradOut, grad_out.is_tracked()),
        ]);
        let [x, gamma, grad_out] = [x, gamma, grad_out].map(|t| t.into_primitive());
        let (x, gamma) = B::rms_norm_backward(x, gamma, grad_out, problem);
        (Self::from_inner(x), Self::from_inner(gamma))
    }

    fn encode_heads(
        x: FloatTensor<Self>,
        gamma: OptionalFloat<Self>,
        table: OptionalFloat<Self>,
        problem: NormProblem,
    ) -> FloatTensor<Self> {
        let table = table.into_option().map(|table| table.into_primitive());
        let Some(gamma) = gamma.into_option() else {
            // Its input is as large as its output, and its own gradient does not need it.
            let node = RotaryNode.prepare::<C>([x.node()]);
            let state = (table.clone(), problem);
            let table = OptionalFloat::from_option(table);
            let out = B::encode_heads(x.into_primitive(), OptionalFloat::None, table, problem);
            return match node.compute_bound().stateful() {
                OpsKind::UnTracked(prep) => prep.finish(out),
                OpsKind::Tracked(prep) => prep.finish(state, out),
            };
        };
        let kept_table = table.clone();
        let encode = move |[x, gamma]: [_; 2]| {
            let table = OptionalFloat::from_option(table.clone());
            B::encode_heads(x, OptionalFloat::Some(gamma), table, problem)
        };
        recomputed::record(HeadsNode, [x, gamma], encode, |keep| {
            (keep(), kept_table, problem)
        })
    }

    fn encode_heads_backward(
        grad_out: FloatTensor<Self>,
        normed: Normed<Self>,
        table: OptionalFloat<Self>,
        problem: NormProblem,
    ) -> NormGrads<Self> {
        first_order([(TensorName::GradOut, grad_out.is_tracked())]);
        let normed = match normed {
            Normed::None => Normed::None,
            Normed::Some { x, gamma } => {
                first_order([
                    (TensorName::Tokens, x.is_tracked()),
                    (TensorName::NormWeight, gamma.is_tracked()),
                ]);
                let (x, gamma) = (x.into_primitive(), gamma.into_primitive());
                Normed::Some { x, gamma }
            }
        };
        let table = table.map(|table| table.into_primitive());
        let NormGrads { x, gamma } =
            B::encode_heads_backward(grad_out.into_primitive(), normed, table, problem);
        NormGrads {
            x: Self::from_inner(x),
            gamma: gamma.map(Self::from_inner),
        }
    }
}

#[derive(Debug)]
struct RmsNormNode;

impl<B: NormOps> Backward<B, 2> for RmsNormNode {
    type State = ([NodeId; 2], NormProblem);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let grad_out = grads.consume::<B>(&ops.node);
        let (inputs, problem) = ops.state;
        let [x, gamma] = inputs.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let (x, gamma) = B::rms_norm_backward(x, gamma, grad_out, problem);
        for (parent, grad) in ops.parents.into_iter().zip([x, gamma]) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// A tensor and its norm; each hands over its gradient.
#[derive(Debug)]
struct BranchNode;

#[derive(Clone, Debug)]
struct Branch<B: NormOps> {
    /// `x` and gamma, checkpointed.
    inputs: [NodeId; 2],
    /// Of `x` as it is, and of its norm.
    gradients: [HandedGradient<B>; 2],
    problem: NormProblem,
}

impl<B: NormOps> Backward<B, 2> for BranchNode {
    type State = Branch<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let branch = ops.state;
        let [skip, normed] = branch.gradients.map(|gradient| gradient.take());
        let [x, gamma] =
            (branch.inputs).map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let of = match (normed, skip) {
            (Some(normed), None) => {
                let (x, gamma) = B::rms_norm_backward(x, gamma, normed, branch.problem);
                [Some(x), Some(gamma)]
            }
            (Some(normed), Some(skip)) => {
                let (x, gamma) = B::rms_norm_backward_onto(x, gamma, normed, skip, branch.problem);
                [Some(x), Some(gamma)]
            }
            (None, skip) => [skip, None],
        };
        for (parent, grad) in ops.parents.into_iter().zip(of) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

#[derive(Debug)]
struct HeadsNode;

impl<B: NormOps> Backward<B, 2> for HeadsNode {
    /// Checkpointed parents, and the table.
    type State = ([NodeId; 2], Option<FloatTensor<B>>, NormProblem);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let grad_out = grads.consume::<B>(&ops.node);
        let (inputs, table, problem) = ops.state;
        let [x, gamma] = inputs.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let table = OptionalFloat::from_option(table);
        let normed = Normed::Some { x, gamma };
        let results = B::encode_heads_backward(grad_out, normed, table, problem);
        let results = [Some(results.x), results.gamma.into_option()];
        for (parent, grad) in ops.parents.into_iter().zip(results) {
            if let (Some(parent), Some(grad)) = (parent, grad) {
                grads.register::<B>(parent.id, grad);
            }
        }
    }
}

/// Heads without a norm: only `x`, of which nothing is kept.
#[derive(Debug)]
struct RotaryNode;

impl<B: NormOps> Backward<B, 1> for RotaryNode {
    type State = (Option<FloatTensor<B>>, NormProblem);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (table, problem) = ops.state;
        let table = OptionalFloat::from_option(table);
        unary::<B, _>(ops.parents, ops.node, grads, |grad_out| {
            B::encode_heads_backward(grad_out, Normed::None, table, problem).x
        });
    }
}
