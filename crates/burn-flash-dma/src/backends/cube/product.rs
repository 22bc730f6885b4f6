//! Products on every CubeCL runtime, by the kernels: strided operands in, contiguous results out.

use super::tensors::{empty, run};
use crate::fallback::product::{
    as_rows, float_dtype, is_empty, output, weight_gradient, with_features,
};
use crate::ops::product::ProductOps;
use crate::validate::checked_element;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{cast, into_contiguous, untile};
use burn_cubecl::ops::reshape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::TensorBinding;
use flash_dma_kernels::product::{Operands, product};
use flash_dma_problem::ElementType;

impl ProductOps for CubeBackend {
    fn linear_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        if is_empty::<Self>(&x, &weight) {
            return output::<Self>(x, weight);
        }
        let out = x.dtype;
        let weight = rounded(weight, out);
        multiply_tokens(x, weight, out)
    }

    fn linear_product_input_gradient(
        grad: FloatTensor<Self>,
        weight: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        if is_empty::<Self>(&grad, &weight) {
            return output::<Self>(grad, transposed(weight));
        }
        let out = grad.dtype;
        let weight = rounded(weight, out);
        multiply_tokens(grad, transposed(weight), out)
    }

    fn linear_product_weight_gradient(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        element: ElementType,
    ) -> FloatTensor<Self> {
        if is_empty::<Self>(&x, &grad) {
            return weight_gradient::<Self>(x, grad, element);
        }
        multiply(transposed(rows(x)), rows(grad), float_dtype(element).into())
    }
}

pub(super) fn rounded(weight: CubeTensor, dtype: DType) -> CubeTensor {
    if weight.dtype == dtype {
        weight
    } else {
        cast(weight, dtype)
    }
}

fn transposed(tensor: CubeTensor) -> CubeTensor {
    let mut tensor = untile(tensor);
    tensor.meta.swap(0, 1);
    tensor
}

/// Tokens of `[.., features]` on one axis; copied if their strides do not allow that.
fn rows(tokens: CubeTensor) -> CubeTensor {
    let shape = as_rows(tokens.meta.shape());
    reshape(tokens, shape)
}

/// `[.., inner] · [inner, features]`.
fn multiply_tokens(tokens: CubeTensor, weight: CubeTensor, out: DType) -> CubeTensor {
    let [_, features] = weight.meta.shape().dims();
    let shape = with_features(tokens.meta.shape(), features);
    reshape(multiply(rows(tokens), weight, out), shape)
}

/// `a · b` in `out`; a matrix without a contiguous axis is copied first.
pub(super) fn multiply(a: CubeTensor, b: CubeTensor, out: DType) -> CubeTensor {
    let (client, element) = (a.client.clone(), checked_element(a.dtype));
    let shape = [a.meta.shape()[0], b.meta.shape()[1]];
    let result = empty(&a, shape, out);
    let [a, b] = [a, b].map(matrix);
    let operands = Operands { a, b, element };
    run(product(
        &client,
        &operands,
        &result.clone().binding(),
        checked_element(out),
    ));
    result
}

/// Binding of a matrix with a contiguous axis; any other is copied first.
fn matrix(tensor: CubeTensor) -> TensorBinding {
    let tensor = untile(tensor);
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    if (0..2).any(|axis| strides[axis] == 1 || shape[axis] <= 1) {
        tensor.binding()
    } else {
        into_contiguous(tensor).binding()
    }
}
