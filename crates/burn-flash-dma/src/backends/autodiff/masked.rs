//! Gradients of masked attention: one fused backward pass for whichever of q, k, v and bias are tracked.

use super::node::{self, Pass, first_order, record};
use crate::ops::masked::MaskedAttentionOps;
use crate::types::{
    Forwarded, MaskedGrads, Masking, OptionalFloat, OptionalPlan, PlanTensors, Saved, Wanted,
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
        wanted: Wanted,
    ) -> Forwarded<Self> {
        let plan = match masking.plan {
            OptionalPlan::None => None,
            OptionalPlan::Some { bits, counts } => Some((bits, counts)),
        };
        let pass = Masked { plan, problem };
        let inputs = [Some(q), Some(k), Some(v), masking.bias.into_option()];
        record::<B, C, _, INPUTS>(inputs, pass, wanted)
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

/// The inputs of a pass: q, k, v and the bias.
const INPUTS: usize = 4;

const BIAS: usize = 3;

/// Masked attention: all of it but its [`INPUTS`].
#[derive(Clone, Debug)]
struct Masked<B: MaskedAttentionOps> {
    plan: Option<(IntTensor<B>, IntTensor<B>)>,
    problem: MaskedProblem,
}

impl<B: MaskedAttentionOps> Masked<B> {
    fn masking(&self, bias: Option<FloatTensor<B>>) -> Masking<B> {
        Masking {
            plan: match self.plan.clone() {
                None => OptionalPlan::None,
                Some((bits, counts)) => OptionalPlan::Some { bits, counts },
            },
            bias: OptionalFloat::from_option(bias),
        }
    }
}

impl<B: MaskedAttentionOps> Pass<B, INPUTS> for Masked<B> {
    fn forward(&self, inputs: [Option<FloatTensor<B>>; INPUTS], wanted: Wanted) -> Forwarded<B> {
        let [q, k, v, bias] = inputs;
        let [q, k, v] = [q, k, v].map(|rows| rows.expect("q, k and v"));
        B::masked_attention_forward(q, k, v, self.masking(bias), self.problem, wanted)
    }

    fn backward(
        self,
        inputs: [Option<FloatTensor<B>>; INPUTS],
        saved: Saved<B>,
        tracked: [bool; INPUTS],
    ) -> [Option<FloatTensor<B>>; INPUTS] {
        let [q, k, v, bias] = inputs;
        let [q, k, v] = [q, k, v].map(|rows| rows.expect("q, k and v"));
        let bias_type = bias.as_ref().map_or(DType::F32, |t| t.dtype());
        let (masking, problem) = (self.masking(bias), self.problem);
        let of_bias = tracked[BIAS];
        let grads = B::masked_attention_backward(q, k, v, masking, saved, problem, of_bias);
        let bias = grads
            .bias
            .into_option()
            .map(|t| match t.dtype() == bias_type {
                true => t,
                false => B::float_cast(t, bias_type.into()),
            });
        [Some(grads.q), Some(grads.k), Some(grads.v), bias]
    }
}
