//! Gradients of masked attention: one fused backward pass for whichever of q, k, v and bias are tracked.

use super::node::{self, Pass, Recorded, constants, first_order, record};
use crate::ops::masked::MaskedAttentionOps;
use crate::types::{
    Forwarded, MaskedGrads, Masking, OptionalFloat, OptionalPlan, PlanTensors, Saved,
};
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{AutodiffBackend, TensorMetadata};
use burn::tensor::DType;
use flash_dma_problem::{MaskedProblem, PlanGeometry, TensorName};

impl<B: MaskedAttentionOps, C: CheckpointStrategy> MaskedAttentionOps for Autodiff<B, C> {
    fn masked_attention_plan(
        mask: BoolTensor<Self>,
        hidden: bool,
        geometry: PlanGeometry,
    ) -> PlanTensors<Self> {
        let PlanTensors { bits, counts } = B::masked_attention_plan(mask, hidden, geometry);
        PlanTensors { bits, counts }
    }

    fn masked_attention_plan_ranges(
        first: IntTensor<Self>,
        end: IntTensor<Self>,
        geometry: PlanGeometry,
    ) -> PlanTensors<Self> {
        let PlanTensors { bits, counts } = B::masked_attention_plan_ranges(first, end, geometry);
        PlanTensors { bits, counts }
    }

    fn masked_attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        masking: Masking<Self>,
        problem: MaskedProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        run::<B, C>([q, k, v], masking, problem, false)
    }

    fn masked_attention_forward_with_residual(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        masking: Masking<Self>,
        problem: MaskedProblem,
    ) -> Forwarded<Self> {
        let [q, k, v] = [q, k, v].map(|t| t.into_primitive());
        let masking = inner(masking);
        constants(B::masked_attention_forward_with_residual(
            q, k, v, masking, problem,
        ))
    }

    fn masked_attention_forward_with_lse(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        masking: Masking<Self>,
        problem: MaskedProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        run::<B, C>([q, k, v], masking, problem, true)
    }

    fn masked_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        masking: Masking<Self>,
        saved: Saved<Self>,
        problem: MaskedProblem,
        bias_gradient: bool,
    ) -> MaskedGrads<Self> {
        let tracked = |t: &OptionalFloat<Self>| t.as_option().is_some_and(|t| t.is_tracked());
        first_order([
            (TensorName::Query, q.is_tracked()),
            (TensorName::Key, k.is_tracked()),
            (TensorName::Value, v.is_tracked()),
            (TensorName::Bias, tracked(&masking.bias)),
            (TensorName::GradOut, saved.grad_out.is_tracked()),
            (TensorName::GradLse, tracked(&saved.grad_lse)),
        ]);
        let (masking, saved) = (inner(masking), node::inner(saved));
        let [q, k, v] = [q, k, v].map(|t| t.into_primitive());
        let grads = B::masked_attention_backward(q, k, v, masking, saved, problem, bias_gradient);
        MaskedGrads {
            q: Self::from_inner(grads.q),
            k: Self::from_inner(grads.k),
            v: Self::from_inner(grads.v),
            bias: grads.bias.map(Self::from_inner),
        }
    }
}

fn inner<B: MaskedAttentionOps, C: CheckpointStrategy>(
    masking: Masking<Autodiff<B, C>>,
) -> Masking<B> {
    Masking {
        plan: match masking.plan {
            OptionalPlan::None => OptionalPlan::None,
            OptionalPlan::Some { bits, counts } => OptionalPlan::Some { bits, counts },
        },
        bias: masking.bias.map(|t| t.into_primitive()),
    }
}

fn run<B: MaskedAttentionOps, C: CheckpointStrategy>(
    [q, k, v]: [Recorded<B, C>; 3],
    masking: Masking<Autodiff<B, C>>,
    problem: MaskedProblem,
    differentiable_lse: bool,
) -> (Recorded<B, C>, Recorded<B, C>) {
    let plan = match masking.plan {
        OptionalPlan::None => None,
        OptionalPlan::Some { bits, counts } => Some((bits, counts)),
    };
    let pass = Masked { plan, problem };
    match masking.bias {
        OptionalFloat::None => record::<B, C, _, 3>([q, k, v], pass, differentiable_lse),
        OptionalFloat::Some(bias) => {
            record::<B, C, _, 4>([q, k, v, bias], pass, differentiable_lse)
        }
    }
}

#[derive(Clone, Debug)]
struct Masked<B: MaskedAttentionOps> {
    plan: Option<(IntTensor<B>, IntTensor<B>)>,
    problem: MaskedProblem,
}

impl<B: MaskedAttentionOps> Masked<B> {
    fn unpack<const N: usize>(
        &self,
        inputs: [FloatTensor<B>; N],
    ) -> ([FloatTensor<B>; 3], Masking<B>) {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("q, k and v");
        let rows = [next(), next(), next()];
        let masking = Masking {
            plan: match self.plan.clone() {
                None => OptionalPlan::None,
                Some((bits, counts)) => OptionalPlan::Some { bits, counts },
            },
            bias: OptionalFloat::from_option(inputs.next()),
        };
        (rows, masking)
    }
}

impl<B: MaskedAttentionOps, const N: usize> Pass<B, N> for Masked<B> {
    fn forward(&self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, FloatTensor<B>) {
        let ([q, k, v], masking) = self.unpack(inputs);
        B::masked_attention_forward(q, k, v, masking, self.problem)
    }

    fn forward_with_residual(&self, inputs: [FloatTensor<B>; N]) -> Forwarded<B> {
        let ([q, k, v], masking) = self.unpack(inputs);
        B::masked_attention_forward_with_residual(q, k, v, masking, self.problem)
    }

    fn backward(
        self,
        inputs: [FloatTensor<B>; N],
        saved: Saved<B>,
        tracked: [bool; N],
    ) -> [Option<FloatTensor<B>>; N] {
        let ([q, k, v], masking) = self.unpack(inputs);
        let bias_type = masking.bias.as_option().map_or(DType::F32, |t| t.dtype());
        let of_bias = tracked.get(3).is_some_and(|&tracked| tracked);
        let grads = B::masked_attention_backward(q, k, v, masking, saved, self.problem, of_bias);
        let bias = match grads.bias {
            OptionalFloat::None => None,
            OptionalFloat::Some(t) if t.dtype() == bias_type => Some(t),
            OptionalFloat::Some(t) => Some(B::float_cast(t, bias_type.into())),
        };
        let mut grads = [Some(grads.q), Some(grads.k), Some(grads.v), bias].into_iter();
        std::array::from_fn(|_| grads.next().flatten())
    }
}
