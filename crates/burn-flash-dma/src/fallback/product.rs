//! Products of linear layers: Burn's own, in f32.

use super::tensors::to_f32;
use crate::spans::span;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};
use flash_dma_problem::ElementType;

/// `x · weight`.
pub fn output<B: Backend>(x: FloatTensor<B>, weight: FloatTensor<B>) -> FloatTensor<B> {
    let _span = span!("product", engine = "default-bodies");
    let (dtype, [_, d_out]) = (x.dtype().into(), weight.shape().dims());
    let shape = with_features(&x.shape(), d_out);
    if is_empty::<B>(&x, &weight) {
        return B::float_zeros(shape, &x.device(), dtype);
    }
    let weight = B::float_cast(weight, dtype);
    let product = B::float_cast(multiply::<B>(rows::<B>(x), weight), dtype);
    B::float_reshape(product, shape)
}

/// `grad · weightᵀ`.
pub fn input_gradient<B: Backend>(grad: FloatTensor<B>, weight: FloatTensor<B>) -> FloatTensor<B> {
    let _span = span!("product", engine = "default-bodies");
    output::<B>(grad, B::float_transpose(weight))
}

/// `xᵀ · grad` in `element`.
pub fn weight_gradient<B: Backend>(
    x: FloatTensor<B>,
    grad: FloatTensor<B>,
    element: ElementType,
) -> FloatTensor<B> {
    let _span = span!("product", engine = "default-bodies");
    if is_empty::<B>(&x, &grad) {
        let shape = [&x, &grad].map(features::<B>);
        return B::float_zeros(shape.into(), &x.device(), float_dtype(element));
    }
    let product = multiply::<B>(B::float_transpose(rows::<B>(x)), rows::<B>(grad));
    B::float_cast(product, float_dtype(element))
}

/// True if a product sums nothing or yields nothing, which not every backend computes.
pub(crate) fn is_empty<B: Backend>(a: &FloatTensor<B>, b: &FloatTensor<B>) -> bool {
    a.shape().num_elements() * b.shape().num_elements() == 0
}

fn features<B: Backend>(tokens: &FloatTensor<B>) -> usize {
    let shape = tokens.shape();
    shape[shape.num_dims() - 1]
}

/// Tokens of `[.., features]` on one axis.
fn rows<B: Backend>(tokens: FloatTensor<B>) -> FloatTensor<B> {
    let shape = as_rows(&tokens.shape());
    B::float_reshape(tokens, shape)
}

/// Shape of the tokens of `[.., features]` on one axis.
pub(crate) fn as_rows(tokens: &Shape) -> Shape {
    let features = tokens[tokens.num_dims() - 1];
    Shape::new([tokens.num_elements() / features, features])
}

/// Shape of tokens with another number of features.
pub(crate) fn with_features(tokens: &Shape, features: usize) -> Shape {
    let mut shape = tokens.clone();
    shape[tokens.num_dims() - 1] = features;
    shape
}

/// Product in f32 of 16-bit or f32 numbers.
fn multiply<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    B::float_matmul(to_f32::<B>(a), to_f32::<B>(b))
}

pub(crate) fn float_dtype(element: ElementType) -> FloatDType {
    match element {
        ElementType::F32 => FloatDType::F32,
        ElementType::F16 => FloatDType::F16,
        ElementType::Bf16 => FloatDType::BF16,
    }
}
