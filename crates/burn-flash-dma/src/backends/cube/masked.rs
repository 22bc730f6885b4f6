//! Masks and biases on every CubeCL runtime.

use super::attention::{binding, empty_outputs, saved_bindings};
use super::packed::empty_gradients;
use super::tensors::{empty, rows, run_checked};
use crate::backends::bias::as_f32;
use crate::ops::masked::MaskedAttentionOps;
use crate::types::{
    Forwarded, MaskedGrads, Masking, OptionalFloat, OptionalPlan, PlanTensors, Saved, Wanted,
};
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::tensor::DType;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use flash_dma_kernels::{Backward, Forward, MaskBits, MaskedGradients, MaskedInputs};
use flash_dma_problem::{EngineChoice, MaskedProblem, PlanGeometry};

impl MaskedAttentionOps for CubeBackend {
    fn masked_attention_plan(
        mask: BoolTensor<Self>,
        hidden: bool,
        geometry: PlanGeometry,
    ) -> PlanTensors<Self> {
        let client = mask.client.clone();
        let size = mask.dtype.size();
        let (tensors, plan) = plan_buffers(&mask, &geometry);
        let mask = untile(mask).binding();
        let result = flash_dma_kernels::plan(&client, &geometry, mask, size, hidden, plan);
        run_checked("the tile plan", [&tensors.bits, &tensors.counts], result);
        tensors
    }

    fn masked_attention_plan_ranges(
        first: IntTensor<Self>,
        end: IntTensor<Self>,
        geometry: PlanGeometry,
    ) -> PlanTensors<Self> {
        let client = first.client.clone();
        let (tensors, plan) = plan_buffers(&first, &geometry);
        let [first, end] = [first, end].map(|keys| untile(keys).binding());
        let result = flash_dma_kernels::plan_ranges(&client, &geometry, first, end, plan);
        run_checked("the tile plan", [&tensors.bits, &tensors.counts], result);
        tensors
    }

    fn masked_attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        masking: Masking<Self>,
        problem: MaskedProblem,
        wanted: Wanted,
    ) -> Forwarded<Self> {
        let client = q.client.clone();
        let results = empty_outputs(&q, &problem.attention, wanted);
        let inputs = inputs(problem.attention.engine, [q, k, v], masking);
        let plan = problem.plan_forward(&client, &inputs, None);
        let result = plan.and_then(|plan| plan.run(results.as_ref().map(binding, binding)));
        run_checked("masked attention's forward pass", results.all(), result);
        Forwarded::from_tensors(results)
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
        let (client, p) = (q.client.clone(), problem.attention);
        let [grad_q, grad_k, grad_v] = empty_gradients([&q, &k, &v], &p);
        let grad_bias =
            (problem.bias.filter(|_| bias_gradient)).map(|shape| empty(&q, shape, DType::F32));
        let grads = MaskedGradients {
            q: grad_q.clone().binding(),
            k: grad_k.clone().binding(),
            v: grad_v.clone().binding(),
            bias: grad_bias.clone().map(CubeTensor::binding),
        };
        let inputs = inputs(p.engine, [q, k, v], masking);
        let saved = saved_bindings(p.engine, saved);
        let plan = problem.plan_backward(&client, &inputs, &saved, None);
        let result = plan.and_then(|plan| plan.run(grads));
        let results = [&grad_q, &grad_k, &grad_v].into_iter().chain(&grad_bias);
        run_checked("masked attention's backward pass", results, result);
        MaskedGrads {
            q: grad_q,
            k: grad_k,
            v: grad_v,
            bias: OptionalFloat::from_option(grad_bias),
        }
    }
}

/// Empty plan tensors on the device of `like`, and the bindings for the kernels to write.
fn plan_buffers(
    like: &CubeTensor,
    geometry: &PlanGeometry,
) -> (PlanTensors<CubeBackend>, MaskBits) {
    let bits = empty(like, geometry.bits_shape(), DType::I32);
    let counts = empty(like, geometry.counts_shape(), DType::I32);
    let plan = MaskBits {
        bits: bits.clone().binding(),
        counts: counts.clone().binding(),
    };
    (PlanTensors { bits, counts }, plan)
}

fn inputs(
    choice: EngineChoice,
    [q, k, v]: [CubeTensor; 3],
    masking: Masking<CubeBackend>,
) -> MaskedInputs {
    MaskedInputs {
        q: rows(choice, q),
        k: rows(choice, k),
        v: rows(choice, v),
        plan: match masking.plan {
            OptionalPlan::None => None,
            OptionalPlan::Some { bits, counts } => Some(MaskBits {
                bits: into_contiguous(bits).binding(),
                counts: into_contiguous(counts).binding(),
            }),
        },
        bias: masking.bias.into_option().map(|bias| {
            let bias = untile(bias);
            let strides = bias.meta.strides().clone();
            as_f32::<CubeBackend>(bias, |axis| strides[axis] == 0).binding()
        }),
    }
}
