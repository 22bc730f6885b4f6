//! Dynamic-mask attention on every CubeCL runtime: strided bindings in, tensors without gaps out.

use super::packed::empty_gradients;
use super::tensors::{addressable, empty, rows, run_checked};
use crate::ops::attention::DynamicMaskOps;
use crate::types::{AttentionGrads, Forwarded, Saved, Selection, Wanted};
use burn::backend::TensorMetadata;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::TensorBinding;
use flash_dma_kernels::{Backward, Forward, Inputs};
use flash_dma_problem::tensors::{Gradients, Outputs};
use flash_dma_problem::{EngineChoice, KeptKeys, Problem};

impl DynamicMaskOps for CubeBackend {
    fn dynamic_mask_select(scores: FloatTensor<Self>, kept: KeptKeys) -> IntTensor<Self> {
        let client = scores.client.clone();
        let mut shape = scores.shape();
        shape.push(2);
        let intervals = empty(&scores, shape, DType::I32);
        let output = intervals.clone().binding();
        let result = flash_dma_kernels::select(&client, addressable(scores), kept, output);
        run_checked("the selection of keys", [&intervals], result);
        intervals
    }

    fn dynamic_mask_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
        wanted: Wanted,
    ) -> Forwarded<Self> {
        let (client, engine) = (q.client.clone(), problem.engine);
        let results = empty_outputs(&q, &problem, wanted);
        let inputs = Inputs {
            q: rows(engine, q),
            k: rows(engine, k),
            v: rows(engine, v),
            selection: selected(selection),
        };
        let plan = problem.plan_forward(&client, &inputs, None);
        let result = plan.and_then(|plan| plan.run(results.as_ref().map(binding, binding)));
        run_checked("attention's forward pass", results.all(), result);
        Forwarded::from_tensors(results)
    }

    fn dynamic_mask_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        saved: Saved<Self>,
        problem: Problem,
    ) -> AttentionGrads<Self> {
        let [grad_q, grad_k, grad_v] = empty_gradients([&q, &k, &v], &problem);
        let words = || empty(&q, problem.scores_shape(), DType::F32);
        let (client, engine) = (q.client.clone(), problem.engine);
        let selection = selected(selection);
        let learns = (selection.as_ref()).is_some_and(|selection| selection.learning.is_some());
        let grads = Gradients {
            q: grad_q,
            k: grad_k,
            v: grad_v,
            scores: problem.scores_learn.then(words),
            rank: learns.then(words),
        };
        let inputs = Inputs {
            q: rows(engine, q),
            k: rows(engine, k),
            v: rows(engine, v),
            selection,
        };
        let saved = saved_bindings(engine, saved);
        let plan = problem.plan_backward(&client, &inputs, &saved, None);
        let bindings = grads.as_ref().map(binding, binding);
        let result = plan.and_then(|plan| plan.run(bindings));
        run_checked("attention's backward pass", grads.all(), result);
        AttentionGrads::from_tensors(grads)
    }
}

/// A tensor's binding, through which the kernels write it.
pub(super) fn binding(tensor: &CubeTensor) -> TensorBinding {
    tensor.clone().binding()
}

/// Room for the outputs of a forward pass that are wanted, on the device of `q`: each token's heads together, as the
/// product that follows attention reads them.
pub(super) fn empty_outputs(
    q: &CubeTensor,
    problem: &Problem,
    wanted: Wanted,
) -> Outputs<CubeTensor> {
    let words = || empty(q, problem.lse_shape(), DType::F32);
    let saved = wanted == Wanted::Saved;
    Outputs {
        out: empty_rows(q, problem.q_shape()),
        residual: (problem.residual_shape())
            .filter(|_| saved)
            .map(|shape| empty_rows(q, shape)),
        lse: words(),
        lse_rest: saved.then(words),
    }
}

fn empty_rows(q: &CubeTensor, [batch, heads, len, head_dim]: [usize; 4]) -> CubeTensor {
    let mut rows = empty(q, [batch, len, heads, head_dim], q.dtype);
    rows.meta.swap(1, 2);
    rows
}

/// Bindings of the forward pass's saved tensors and of the incoming gradients.
pub(super) fn saved_bindings(
    choice: EngineChoice,
    saved: Saved<CubeBackend>,
) -> flash_dma_kernels::Saved {
    let words = |tensor| into_contiguous(tensor).binding();
    saved
        .into_tensors()
        .map(|tensor| rows(choice, tensor), words)
}

fn selected(selection: Selection<CubeBackend>) -> Option<flash_dma_kernels::Selection> {
    let words = |tensor| into_contiguous(tensor).binding();
    let selection = selection.into_tensors();
    selection.map(|selection| selection.map(addressable, words, words))
}
