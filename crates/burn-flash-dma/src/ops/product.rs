//! The products of linear layers.

use crate::fallback::product as fallback;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "fusion")]
use burn::{backend::fusion::custom::TensorSpec, tensor::DType};
use flash_dma_problem::ElementType;

/// The three products of a linear layer without bias: its output, and the gradients of its input and of its weight.
///
/// Most users want [`linear`](crate::linear()) and [`product`](crate::product()), which validate. Operands are f32, f16
/// or bf16, and sums are in f32 and rounded once; the sum of nothing is zero. The tokens of `x` and of a gradient may be on any number
/// of axes: a reshape before the product would be a node of its own, which keeps what its parent need not keep.
///
/// The default bodies are Burn's own matrix product in f32. That is enough where it is as fast as it gets: on Burn's
/// CPU backends a product is one call of a blocked, threaded routine, whose blocks along the summed axis stay in
/// registers and caches, so that neither another kernel nor a division of the sums has anything to gain.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait ProductOps: Backend {
    /// `x · weight`: `[.., d_in]` and `[d_in, d_out]` to `[.., d_out]` in the type of `x`, to which the weight is
    /// rounded.
    #[fusion(meta = output_meta)]
    fn linear_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        fallback::output::<Self>(x, weight)
    }

    /// The gradient of `x`: `grad · weightᵀ`, `[.., d_out]` and `[d_in, d_out]` to `[.., d_in]` in the type of
    /// `grad`, to which the weight is rounded.
    #[fusion(meta = input_gradient_meta)]
    fn linear_product_input_gradient(
        grad: FloatTensor<Self>,
        weight: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        fallback::input_gradient::<Self>(grad, weight)
    }

    /// The gradient of the weight: `xᵀ · grad` over all tokens, `[.., d_in]` and `[.., d_out]`, both of one type, to
    /// `[d_in, d_out]` in `element`: the weight's own type, so that the gradient of an f32 parameter is not rounded to 16
    /// bits.
    #[fusion(meta = weight_gradient_meta)]
    fn linear_product_weight_gradient(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        element: ElementType,
    ) -> FloatTensor<Self> {
        fallback::weight_gradient::<Self>(x, grad, element)
    }
}

// Shapes under fusion are taken from here and never compared with what the engine returns.

#[cfg(feature = "fusion")]
fn output_meta(x: &TensorSpec, weight: &TensorSpec) -> TensorSpec {
    with_features(x, weight.shape[1])
}

#[cfg(feature = "fusion")]
fn input_gradient_meta(grad: &TensorSpec, weight: &TensorSpec) -> TensorSpec {
    with_features(grad, weight.shape[0])
}

#[cfg(feature = "fusion")]
fn weight_gradient_meta(x: &TensorSpec, grad: &TensorSpec, element: &ElementType) -> TensorSpec {
    let dtype: DType = fallback::float_dtype(*element).into();
    let features = |tokens: &TensorSpec| tokens.shape[tokens.shape.num_dims() - 1];
    TensorSpec::new([features(x), features(grad)].into(), dtype)
}

/// Tokens of another number of features.
#[cfg(feature = "fusion")]
fn with_features(tokens: &TensorSpec, features: usize) -> TensorSpec {
    let shape = fallback::with_features(&tokens.shape, features);
    TensorSpec::new(shape, tokens.dtype)
}
