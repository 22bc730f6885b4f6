//! The gate of a feed-forward network.

use super::product::{check_weight, try_linear, with_bias};
use crate::ops::TrainingOps;
use crate::validate::{check_element, check_shape, computes_in, element_type, same_device};
use burn::backend::Dispatch;
use burn::nn::Linear;
use burn::tensor::Tensor;
use flash_dma_problem::{AttentionError, TensorName};

twin! {
    /// SwiGLU without its products: `silu(gate) * up`, element by element.
    ///
    /// | tensor | shape | type |
    /// |---|---|---|
    /// | `gate`, `up`, result | any, the same | f32, f16 or bf16, the same |
    ///
    /// Arithmetic is f32, rounded once. Differentiable in both. The backward pass keeps only `gate` and `up` and
    /// computes the result again, where Burn's `silu(gate) * up` keeps three more tensors. The layers of Burn's
    /// `SwiGlu` fit:
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// # use burn::tensor::{Device, Distribution, Tensor};
    /// use burn::nn::SwiGluConfig;
    /// use burn_flash_dma::{linear, swiglu};
    ///
    /// # let device = Device::flex();
    /// let layers = SwiGluConfig::new(24, 64).init(&device);
    /// let x = Tensor::<3>::random([2, 5, 24], Distribution::Normal(0.0, 1.0), &device);
    /// let hidden = swiglu(linear(&layers.linear_inner, x.clone()), linear(&layers.linear_outer, x.clone()));
    /// let theirs = layers.forward(x);
    /// assert!((hidden - theirs).abs().max().into_scalar::<f32>() < 1e-5);
    /// # }
    /// ```
    pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> = try_swiglu;
}

/// Like [`swiglu`], but returns the error. An empty result is a constant to autodiff.
///
/// # Errors
///
/// [`AttentionError`] if the shapes, element types or devices do not fit, or the device does not compute in the type;
/// nothing is computed then.
pub fn try_swiglu<const D: usize>(
    gate: Tensor<D>,
    up: Tensor<D>,
) -> Result<Tensor<D>, AttentionError> {
    check(&gate, &up)?;
    if gate.dims().contains(&0) {
        return Ok(Tensor::zeros(gate.dims(), (&gate.device(), gate.dtype())));
    }
    let out = Dispatch::training_swiglu(gate.into_dispatch(), up.into_dispatch());
    Ok(Tensor::from_dispatch(out))
}

fn check<const D: usize>(gate: &Tensor<D>, up: &Tensor<D>) -> Result<(), AttentionError> {
    let name = TensorName::Up;
    let element = element_type(TensorName::Gate, gate)?;
    check_element(name, up, element)?;
    check_shape(name, &up.dims(), &gate.dims())?;
    let device = gate.device();
    same_device(&device, name, up.device())?;
    computes_in(&device, gate.dtype(), element)
}

twin! {
    /// [`linear`](crate::linear()) after [`swiglu`]: the whole end of a gated feed-forward network, `[.., hidden]` to
    /// `[.., d_out]`. Where the two by themselves compute `swiglu`'s result once more for the gradient of the weight, this
    /// does so in the pass that makes the gradients of `gate` and `up`.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// # use burn::tensor::{Device, Distribution, Tensor};
    /// use burn::nn::{LinearConfig, SwiGluConfig};
    /// use burn_flash_dma::{linear, swiglu_linear};
    ///
    /// # let device = Device::flex();
    /// let layers = SwiGluConfig::new(24, 64).init(&device);
    /// let down = LinearConfig::new(64, 24).init(&device);
    /// let x = Tensor::<3>::random([2, 5, 24], Distribution::Normal(0.0, 1.0), &device);
    /// let [gate, up] = [&layers.linear_inner, &layers.linear_outer].map(|layer| linear(layer, x.clone()));
    /// let y = swiglu_linear(gate, up, &down);
    /// let theirs = down.forward(layers.forward(x));
    /// assert!((y - theirs).abs().max().into_scalar::<f32>() < 1e-5);
    /// # }
    /// ```
    pub fn swiglu_linear<const D: usize>(gate: Tensor<D>, up: Tensor<D>, layer: &Linear) -> Tensor<D>
        = try_swiglu_linear;
}

/// Like [`swiglu_linear`], but returns the error. A result of nothing is a constant to autodiff.
///
/// # Errors
///
/// See [`try_swiglu`] and [`try_linear`].
pub fn try_swiglu_linear<const D: usize>(
    gate: Tensor<D>,
    up: Tensor<D>,
    layer: &Linear,
) -> Result<Tensor<D>, AttentionError> {
    check(&gate, &up)?;
    let weight = layer.weight.val();
    let ours = element_type(TensorName::Weight, &weight).is_ok();
    if !ours || gate.dims().contains(&0) {
        return try_linear(layer, try_swiglu(gate, up)?);
    }
    check_weight(&gate, &weight)?;
    let out = Dispatch::training_swiglu_product(
        gate.into_dispatch(),
        up.into_dispatch(),
        weight.into_dispatch(),
    );
    Ok(with_bias(Tensor::from_dispatch(out), layer))
}
