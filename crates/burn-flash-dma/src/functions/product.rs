//! Linear layers on this crate's products.

use crate::ops::ProductOps;
use crate::validate::{check_shape, computes_in, element_type, same_device};
use burn::backend::Dispatch;
use burn::nn::Linear;
use burn::tensor::{DType, Tensor};
use flash_dma_problem::{AttentionError, TensorName};

twin! {
    /// `layer.forward(x)` on this crate's products, `[.., d_in]` to `[.., d_out]`. On CubeCL's runtimes a rule picks
    /// the kernel of each product by its sizes, and the sums of a weight's gradient are split to fill the device.
    /// Sums are in f32. An f32 layer may be applied to f16 or bf16: it is rounded for the product, and its gradients
    /// arrive in f32, without the rounding of a cast. Other element types (f64 throughout, or quantised weights) use
    /// Burn's own product.
    ///
    /// ```
    /// # #[cfg(all(feature = "flex", feature = "autodiff"))] {
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{DType, Device, Distribution, Tensor};
    ///
    /// let device = Device::flex().autodiff();
    /// let layer = LinearConfig::new(64, 32).init(&device);
    /// let x = Tensor::<3>::random([2, 100, 64], Distribution::Normal(0.0, 1.0), &device);
    /// let y = burn_flash_dma::linear(&layer, x.cast(DType::BF16));
    /// assert_eq!((y.dims(), y.dtype()), ([2, 100, 32], DType::BF16));
    ///
    /// let grads = y.sum().backward();
    /// assert_eq!(layer.weight.grad(&grads).unwrap().dtype(), DType::F32);
    /// # }
    /// ```
    pub fn linear<const D: usize>(layer: &Linear, x: Tensor<D>) -> Tensor<D> = try_linear;
}

/// Like [`linear`], but returns the error. An empty product in f64 is a constant to autodiff.
///
/// # Errors
///
/// [`AttentionError`] if the last axis of `x` is not the layer's input, the layer is on another device, or exactly
/// one of them is f64.
pub fn try_linear<const D: usize>(
    layer: &Linear,
    x: Tensor<D>,
) -> Result<Tensor<D>, AttentionError> {
    let weight = layer.weight.val();
    let ours = element_type(TensorName::Tokens, &x).is_ok()
        && element_type(TensorName::Weight, &weight).is_ok();
    if !ours {
        check_for_burn(&x, &weight)?;
    }
    let is_empty = x.dims().contains(&0) || weight.dims().contains(&0);
    let y = match (ours, is_empty) {
        (true, _) => try_product(x, weight)?,
        (false, false) => return Ok(layer.forward(x)),
        // Not every backend multiplies empty matrices, and Flex reads out of bounds.
        (false, true) => {
            let mut shape = x.dims();
            shape[D - 1] = weight.dims()[1];
            Tensor::zeros(shape, (&x.device(), x.dtype()))
        }
    };
    Ok(with_bias(y, layer))
}

pub(super) fn with_bias<const D: usize>(y: Tensor<D>, layer: &Linear) -> Tensor<D> {
    match &layer.bias {
        // Burn cannot reshape an empty bias.
        Some(bias) if y.dims()[D - 1] > 0 => {
            let bias = bias.val().cast(y.dtype());
            y + bias.unsqueeze()
        }
        _ => y,
    }
}

twin! {
    /// The product `[.., d_in] · [d_in, d_out]` as in [`linear`], with any weight: a tied embedding, for example. The
    /// result has the type of `x`.
    pub fn product<const D: usize>(x: Tensor<D>, weight: Tensor<2>) -> Tensor<D> = try_product;
}

/// Like [`product`], but returns the error.
///
/// # Errors
///
/// [`AttentionError`] if the last axis of `x` is not the first of the weight, a tensor is not f32, f16 or bf16, the
/// device does not compute in the type of `x`, or the tensors are on different devices.
pub fn try_product<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
) -> Result<Tensor<D>, AttentionError> {
    check_product(&x, &weight)?;
    let out = Dispatch::linear_product(x.into_dispatch(), weight.into_dispatch());
    Ok(Tensor::from_dispatch(out))
}

/// Refuses operands of [`try_product`] that do not fit.
pub(crate) fn check_product<const D: usize>(
    x: &Tensor<D>,
    weight: &Tensor<2>,
) -> Result<(), AttentionError> {
    check_weight(x, weight)?;
    let element = element_type(TensorName::Tokens, x)?;
    element_type(TensorName::Weight, weight)?;
    computes_in(&x.device(), x.dtype(), element)
}

/// Refuses a weight that does not fit the features of `x`, or is on another device.
pub(super) fn check_weight<const D: usize>(
    x: &Tensor<D>,
    weight: &Tensor<2>,
) -> Result<(), AttentionError> {
    let (dims, [_, d_out]) = (x.dims(), weight.dims());
    check_shape(TensorName::Weight, &weight.dims(), &[dims[D - 1], d_out])?;
    same_device(&x.device(), TensorName::Weight, weight.device())
}

/// Refuses operands that Burn's product does not take: only a quantised weight may have another type than `x`.
fn check_for_burn<const D: usize>(x: &Tensor<D>, weight: &Tensor<2>) -> Result<(), AttentionError> {
    check_weight(x, weight)?;
    let (actual, expected) = (x.dtype(), weight.dtype());
    if actual == expected || matches!(expected, DType::QFloat(_)) {
        return Ok(());
    }
    Err(AttentionError::ElementType {
        tensor: TensorName::Tokens,
        expected: expected.name().into(),
        actual: actual.name().into(),
    })
}
