//! The gate of a feed-forward network.

use crate::ops::TrainingOps;
use crate::validate::{check_element, check_shape, computes_in, element_type, same_device};
use burn::backend::Dispatch;
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
    let name = TensorName::Up;
    let element = element_type(TensorName::Gate, &gate)?;
    check_element(name, &up, element)?;
    check_shape(name, &up.dims(), &gate.dims())?;
    let device = gate.device();
    same_device(&device, name, up.device())?;
    computes_in(&device, gate.dtype(), element)?;
    if gate.dims().contains(&0) {
        return Ok(Tensor::zeros(gate.dims(), (&device, gate.dtype())));
    }
    let out = Dispatch::training_swiglu(gate.into_dispatch(), up.into_dispatch());
    Ok(Tensor::from_dispatch(out))
}
