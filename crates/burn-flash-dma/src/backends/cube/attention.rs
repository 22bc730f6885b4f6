//! Dynamic-mask attention on every CubeCL runtime: strided bindings in, tensors without gaps out.

use super::packed::empty_gradients;
use super::tensors::{addressable, empty, rows, run_checked};
use crate::ops::attention::DynamicMaskOps;
use crate::ops::types::{AttentionGrads, Forwarded, OptionalFloat, RunnersUp, Saved, Selection};
use burn::backend::TensorMetadata;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use flash_dma_kernels::{Gradients, Inputs, Outputs, backward, forward};
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
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let results = Results::alone(&q, &problem);
        run_forward([q, k, v], selection, problem, &results);
        (results.out, results.lse)
    }

    fn dynamic_mask_forward_with_residual(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> Forwarded<Self> {
        let results = Results::for_backward(&q, &problem);
        run_forward([q, k, v], selection, problem, &results);
        results.into_forwarded()
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
        let [grad_q, grad_k, grad_v] = empty_gradients([&q, &k, &v], &problem);
        let words = || empty(&q, problem.scores_shape(), DType::F32);
        let grad_scores = problem.has_scores.then(words);
        let has_far = matches!(
            &selection,
            Selection::Scored {
                runners_up: RunnersUp::Some { .. },
                ..
            }
        );
        let grad_rank = has_far.then(words);
        let grads = Gradients {
            q: grad_q.clone().binding(),
            k: grad_k.clone().binding(),
            v: grad_v.clone().binding(),
            scores: grad_scores.clone().map(CubeTensor::binding),
            rank: grad_rank.clone().map(CubeTensor::binding),
        };
        let inputs = inputs(problem.engine, [q, k, v], selection);
        let saved = saved_bindings(problem.engine, saved);
        let plan = backward::plan(&client, &problem, &inputs, &saved);
        let result = plan.and_then(|plan| plan.run(grads));
        let results = [&grad_q, &grad_k, &grad_v].into_iter();
        let results = results.chain(&grad_scores).chain(&grad_rank);
        run_checked("attention's backward pass", results, result);
        AttentionGrads {
            q: grad_q,
            k: grad_k,
            v: grad_v,
            scores: OptionalFloat::from_option(grad_scores),
            rank: OptionalFloat::from_option(grad_rank),
        }
    }
}

fn run_forward(
    rows: [CubeTensor; 3],
    selection: Selection<CubeBackend>,
    problem: Problem,
    results: &Results,
) {
    let client = rows[0].client.clone();
    let inputs = inputs(problem.engine, rows, selection);
    let plan = forward::plan(&client, &problem, &inputs);
    let result = plan.and_then(|plan| plan.run(results.bindings()));
    run_checked("attention's forward pass", results.all(), result);
}

pub(super) struct Results {
    pub(super) out: CubeTensor,
    pub(super) lse: CubeTensor,
    /// For the backward pass: rounding error of a 16-bit `out`, and of `lse`.
    residual: Option<CubeTensor>,
    lse_rest: Option<CubeTensor>,
}

impl Results {
    /// Empty results on the device of `q`, for a forward pass without a backward pass: each token's heads together,
    /// as the output projection reads them.
    pub(super) fn alone(q: &CubeTensor, problem: &Problem) -> Self {
        Self {
            out: empty_rows(q, problem.q_shape()),
            lse: empty(q, problem.lse_shape(), DType::F32),
            residual: None,
            lse_rest: None,
        }
    }

    /// [`alone`](Self::alone) with the buffers for a backward pass.
    pub(super) fn for_backward(q: &CubeTensor, problem: &Problem) -> Self {
        Self {
            residual: (problem.residual_shape()).map(|shape| empty_rows(q, shape)),
            lse_rest: Some(empty(q, problem.lse_shape(), DType::F32)),
            ..Self::alone(q, problem)
        }
    }

    pub(super) fn bindings(&self) -> Outputs {
        let optional = |tensor: &Option<CubeTensor>| tensor.clone().map(CubeTensor::binding);
        Outputs {
            out: self.out.clone().binding(),
            residual: optional(&self.residual),
            lse: self.lse.clone().binding(),
            lse_rest: optional(&self.lse_rest),
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &CubeTensor> {
        let always = [&self.out, &self.lse].into_iter();
        always.chain(&self.residual).chain(&self.lse_rest)
    }

    /// The results for the backward pass.
    ///
    /// # Panics
    ///
    /// Unless they are [`for_backward`](Self::for_backward).
    pub(super) fn into_forwarded(self) -> Forwarded<CubeBackend> {
        let lse_rest = self.lse_rest;
        Forwarded {
            out: self.out,
            residual: OptionalFloat::from_option(self.residual),
            lse: self.lse,
            lse_rest: lse_rest.expect("it is written for a backward pass"),
        }
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
    flash_dma_kernels::Saved {
        out: rows(choice, saved.out),
        residual: (saved.residual.into_option()).map(|residual| rows(choice, residual)),
        lse: into_contiguous(saved.lse).binding(),
        lse_rest: (saved.lse_rest.into_option()).map(|t| into_contiguous(t).binding()),
        grad_out: rows(choice, saved.grad_out),
        grad_lse: (saved.grad_lse.into_option()).map(|t| into_contiguous(t).binding()),
    }
}

fn inputs(
    choice: EngineChoice,
    [q, k, v]: [CubeTensor; 3],
    selection: Selection<CubeBackend>,
) -> Inputs {
    Inputs {
        q: rows(choice, q),
        k: rows(choice, k),
        v: rows(choice, v),
        selection: match selection {
            Selection::All => None,
            Selection::Scored {
                scores,
                intervals,
                runners_up,
            } => Some(flash_dma_kernels::Selection {
                scores: addressable(scores),
                intervals: into_contiguous(intervals).binding(),
                far: match runners_up {
                    RunnersUp::None => None,
                    RunnersUp::Some {
                        far,
                        max_live,
                        left_out,
                        ..
                    } => Some(flash_dma_kernels::Far {
                        ends: into_contiguous(far).binding(),
                        max_live,
                        left_out: (left_out.into_option())
                            .map(|from| into_contiguous(from).binding()),
                    }),
                },
            }),
        },
    }
}
