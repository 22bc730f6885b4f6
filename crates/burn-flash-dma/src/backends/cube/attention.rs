//! Every CubeCL runtime, on the kernels: strided bindings in, contiguous tensors out.

use crate::ops::attention::DynamicMaskOps;
use crate::ops::types::{AttentionGrads, OptionalFloat, Saved, Selection};
use burn::backend::TensorMetadata;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::TensorBinding;
use flash_dma_kernels::{Gradients, Inputs};
use flash_dma_problem::{AttentionError, Problem};

impl DynamicMaskOps for CubeBackend {
    fn dynamic_mask_select(scores: FloatTensor<Self>, window: usize) -> IntTensor<Self> {
        let client = scores.client.clone();
        let mut shape = scores.shape();
        shape.push(2);
        let intervals = empty(&scores, shape, DType::I32);
        let output = intervals.clone().binding();
        let result = flash_dma_kernels::select(&client, addressable(scores), window, output);
        run_checked("the selection of keys", [&intervals], result);
        intervals
    }

    fn dynamic_mask_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let client = q.client.clone();
        let out = empty(&q, problem.q_shape(), q.dtype);
        let lse = empty(&q, problem.lse_shape(), DType::F32);
        let result = flash_dma_kernels::forward(
            &client,
            &problem,
            inputs(q, k, v, selection),
            out.clone().binding(),
            lse.clone().binding(),
        );
        run_checked("attention's forward pass", [&out, &lse], result);
        (out, lse)
    }

    fn dynamic_mask_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        saved: Saved<Self>,
        problem: Problem,
    ) -> AttentionGrads<Self> {
        let client = q.client.clone();
        let grad_q = empty(&q, problem.q_shape(), q.dtype);
        let grad_k = empty(&q, problem.kv_shape(), q.dtype);
        let grad_v = empty(&q, problem.kv_shape(), q.dtype);
        let grad_scores = problem
            .has_scores
            .then(|| empty(&q, problem.scores_shape(), DType::F32));
        let result = flash_dma_kernels::backward(
            &client,
            &problem,
            inputs(q, k, v, selection),
            flash_dma_kernels::Saved {
                out: addressable(saved.out),
                lse: into_contiguous(saved.lse).binding(),
                grad_out: addressable(saved.grad_out),
                grad_lse: match saved.grad_lse {
                    OptionalFloat::None => None,
                    OptionalFloat::Some(t) => Some(into_contiguous(t).binding()),
                },
            },
            Gradients {
                q: grad_q.clone().binding(),
                k: grad_k.clone().binding(),
                v: grad_v.clone().binding(),
                scores: grad_scores.clone().map(CubeTensor::binding),
            },
        );
        let results = [&grad_q, &grad_k, &grad_v].into_iter().chain(&grad_scores);
        run_checked("attention's backward pass", results, result);
        AttentionGrads {
            q: grad_q,
            k: grad_k,
            v: grad_v,
            scores: match grad_scores {
                None => OptionalFloat::None,
                Some(t) => OptionalFloat::Some(t),
            },
        }
    }
}

fn inputs(
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    selection: Selection<CubeBackend>,
) -> Inputs {
    Inputs {
        q: addressable(q),
        k: addressable(k),
        v: addressable(v),
        selection: match selection {
            Selection::All => None,
            Selection::Scored { scores, intervals } => Some(flash_dma_kernels::Selection {
                scores: addressable(scores),
                intervals: into_contiguous(intervals).binding(),
            }),
        },
    }
}

/// The functions on `Tensor` have validated the call, so what fails is the device; it fails by name. What is known once
/// the kernels are queued: memory that ran out, kernels that did not compile or were refused.
///
/// # Panics
///
/// With the text of [`AttentionError::DeviceFailed`]. Under fusion that is an error of every read of the results.
pub(crate) fn run_checked<'a>(
    operation: &'static str,
    results: impl IntoIterator<Item = &'a CubeTensor>,
    result: Result<(), AttentionError>,
) {
    let mut results = results.into_iter().peekable();
    let client = results
        .peek()
        .expect("an operation has a result")
        .client
        .clone();
    let handles = results.map(|tensor| &tensor.handle);
    run(result.and_then(|()| flash_dma_kernels::check(&client, operation, handles)));
}

/// As [`run_checked`], for a step over a cache: it waits for nothing, not even for the kernels to be queued, so a device
/// that fails is reported by the read of what the step gives.
pub(crate) fn run(result: Result<(), AttentionError>) {
    result.unwrap_or_else(|error| panic!("{error}"));
}

/// Any strides but those of a last axis that is not contiguous, and of storage tiles: these copy.
pub(crate) fn addressable(tensor: CubeTensor) -> TensorBinding {
    let tensor = untile(tensor);
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let contiguous = match (shape.last(), strides.last()) {
        (Some(&size), Some(&stride)) => size <= 1 || stride == 1,
        _ => true,
    };
    if contiguous {
        tensor.binding()
    } else {
        into_contiguous(tensor).binding()
    }
}

/// A contiguous tensor beside `like`. (The plain allocation may pad its rows.)
pub(crate) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    empty_device_contiguous_dtype(client, device, shape.into(), dtype)
}
