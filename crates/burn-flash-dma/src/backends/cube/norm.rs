//! Norms and rotary encoding on every CubeCL runtime.

use super::tensors::{addressable, empty, run_checked, run_over};
use crate::ops::norm::NormOps;
use crate::types::{NormGrads, Normed, OptionalFloat};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::reshape;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::TensorBinding;
use flash_dma_kernels::{NormGradients, NormParameters, norm_backward, norm_forward};
use flash_dma_problem::{NormProblem, contiguous_strides};

const FORWARD: &str = "the norm's forward pass";
const BACKWARD: &str = "the norm's backward pass";

impl NormOps for CubeBackend {
    fn rms_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        problem: NormProblem,
    ) -> FloatTensor<Self> {
        let client = x.client.clone();
        let out = empty(&x, x.meta.shape().clone(), x.dtype);
        let result = norm_forward(
            &client,
            &problem,
            rows(x, problem.x_shape()),
            &parameters(Some(gamma), None),
            shaped(&out, problem.out_shape()),
        );
        run_over(problem.batch * problem.len, FORWARD, &out, result);
        out
    }

    fn rms_norm_backward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        grad_out: FloatTensor<Self>,
        problem: NormProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        rows_backward(x, gamma, grad_out, None, problem)
    }

    fn rms_norm_backward_onto(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        grad_out: FloatTensor<Self>,
        other: FloatTensor<Self>,
        problem: NormProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        rows_backward(x, gamma, grad_out, Some(other), problem)
    }

    fn encode_heads(
        x: FloatTensor<Self>,
        gamma: OptionalFloat<Self>,
        table: OptionalFloat<Self>,
        problem: NormProblem,
    ) -> FloatTensor<Self> {
        let client = x.client.clone();
        // In the memory order of `x`, viewed with heads before tokens.
        let mut out = empty(&x, problem.x_shape(), x.dtype);
        out.meta.swap(1, 2);
        let result = norm_forward(
            &client,
            &problem,
            addressable(x),
            &parameters(gamma.into_option(), table.into_option()),
            out.clone().binding(),
        );
        run_over(problem.batch * problem.len, FORWARD, &out, result);
        out
    }

    fn encode_heads_backward(
        grad_out: FloatTensor<Self>,
        normed: Normed<Self>,
        table: OptionalFloat<Self>,
        problem: NormProblem,
    ) -> NormGrads<Self> {
        let client = grad_out.client.clone();
        let (x, gamma) = match normed {
            Normed::None => (None, None),
            Normed::Some { x, gamma } => (Some(addressable(x)), Some(gamma)),
        };
        let grad_x = empty(&grad_out, problem.x_shape(), grad_out.dtype);
        let of_gamma = |gamma: &CubeTensor| empty(&grad_out, [problem.width], gamma.dtype);
        let grad_gamma = gamma.as_ref().map(of_gamma);
        let result = norm_backward(
            &client,
            &problem,
            x,
            &parameters(gamma, table.into_option()),
            addressable(grad_out),
            None,
            NormGradients {
                x: grad_x.clone().binding(),
                gamma: grad_gamma.clone().map(CubeTensor::binding),
            },
        );
        run_checked(BACKWARD, [&grad_x].into_iter().chain(&grad_gamma), result);
        NormGrads {
            x: grad_x,
            gamma: OptionalFloat::from_option(grad_gamma),
        }
    }
}

fn rows_backward(
    x: CubeTensor,
    gamma: CubeTensor,
    grad_out: CubeTensor,
    other: Option<CubeTensor>,
    problem: NormProblem,
) -> (CubeTensor, CubeTensor) {
    let client = x.client.clone();
    let grad_x = empty(&x, x.meta.shape().clone(), x.dtype);
    let grad_gamma = empty(&x, [problem.width], gamma.dtype);
    let result = norm_backward(
        &client,
        &problem,
        Some(rows(x, problem.x_shape())),
        &parameters(Some(gamma), None),
        rows(grad_out, problem.out_shape()),
        other.map(|other| rows(other, problem.x_shape())),
        NormGradients {
            x: shaped(&grad_x, problem.x_shape()),
            gamma: Some(grad_gamma.clone().binding()),
        },
    );
    run_checked(BACKWARD, [&grad_x, &grad_gamma], result);
    (grad_x, grad_gamma)
}

fn parameters(gamma: Option<CubeTensor>, table: Option<CubeTensor>) -> NormParameters {
    NormParameters {
        gamma: gamma.map(|gamma| into_contiguous(gamma).binding()),
        table: table.map(|table| {
            let mut table = addressable(table);
            let ([positions, width, two], [position, feature, one]) =
                (sizes(&table.shape), sizes(&table.strides));
            // Both features of a pair share its angle.
            table.shape = [positions, width / 2, two].into();
            table.strides = [position, 2 * feature, one].into_iter().collect();
            table
        }),
    }
}

fn sizes(axes: &[usize]) -> [usize; 3] {
    axes.try_into().expect("a table has three axes")
}

/// Rows of a tensor of any rank, in the shape of a problem of rows. Without rows there is nothing to reshape.
fn rows(tensor: CubeTensor, shape: [usize; 4]) -> TensorBinding {
    if shape.contains(&0) {
        return shaped(&tensor, shape);
    }
    addressable(reshape(tensor, Shape::new(shape)))
}

fn shaped(tensor: &CubeTensor, shape: [usize; 4]) -> TensorBinding {
    TensorBinding {
        shape: shape.into(),
        strides: contiguous_strides(&shape).collect(),
        ..tensor.clone().binding()
    }
}
