//! Products of linear layers.

use crate::fallback::product as fallback;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use flash_dma_problem::ElementType;

/// Products of a linear layer without bias: its output, and the gradients of its input and of its weight.
///
/// Most users want [`linear`](crate::linear()) and [`product`](crate::product()), which validate. Operands are f32,
/// f16 or bf16; sums are in f32 and rounded once, and an empty sum is zero. The tokens of `x` and of a gradient may
/// be on any number of axes: a reshape would be a graph node that keeps a tensor its parent need not keep. The
/// default bodies are Burn's own matrix product in f32, which is as fast as it gets on its CPU backends.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait ProductOps: Backend {
    /// `x · weight`: `[.., d_in]` and `[d_in, d_out]` to `[.., d_out]` in the type of `x`, to which the weight is
    /// rounded.
    #[fusion(dtype = x, shape = fallback::with_features(x, weight[1]))]
    fn linear_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        fallback::output::<Self>(x, weight)
    }

    /// Gradient of `x`: `grad · weightᵀ`, `[.., d_out]` and `[d_in, d_out]` to `[.., d_in]` in the type of `grad`, to
    /// which the weight is rounded.
    #[fusion(dtype = grad, shape = fallback::with_features(grad, weight[0]))]
    fn linear_product_input_gradient(
        grad: FloatTensor<Self>,
        weight: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        fallback::input_gradient::<Self>(grad, weight)
    }

    /// Gradient of the weight: `xᵀ · grad` over all tokens, `[.., d_in]` and `[.., d_out]`, both of one type, to
    /// `[d_in, d_out]` in `element`, the weight's own type.
    #[fusion(
        dtype = fallback::float_dtype(*element).into(),
        shape = [x, grad].map(|tokens| tokens[tokens.num_dims() - 1]).into()
    )]
    fn linear_product_weight_gradient(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        element: ElementType,
    ) -> FloatTensor<Self> {
        fallback::weight_gradient::<Self>(x, grad, element)
    }
}
