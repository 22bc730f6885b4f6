//! A sink logit without a key, in the softmax of every query.

use crate::fallback::sink;
use crate::validate::{as_f32, check_element, check_shape, computes_in, element_type, same_device};
use burn::backend::Dispatch;
use burn::tensor::{Device, Tensor};
use flash_dma_problem::{AttentionError, ElementType, TensorName};

twin! {
    /// Adds a logit without a value to the softmax of each query head, given the `(out, lse)` of an attention: the
    /// *learnable sink* of models such as gpt-oss, by which a query that matches no key can attend to nothing. `out`
    /// becomes `out * sigmoid(lse - logits)`, and the LSE that of all logits. (A sink among the keys,
    /// [`Selector::sinks`](crate::Selector::sinks), takes a place in the window instead.)
    ///
    /// | tensor | shape | type |
    /// |---|---|---|
    /// | `out`, and the result's | `[batch, q_heads, q_len, head_dim]` | f32, f16 or bf16 |
    /// | `lse`, and the result's | `[batch, q_heads, q_len]` | f32 |
    /// | `logits` | `[q_heads]` | f32, f16 or bf16; finite |
    ///
    /// `out` and `lse` may come from any call that gives an LSE. Differentiable in all three; the factor is computed
    /// in f32 and rounded to the type of `out`. It has the rounding of an f32 LSE: a relative error of up to 3e-5 at
    /// an LSE of 1000, of 3e-2 at 1e6, if the logit is near it. A row that attends to nothing (an LSE of −∞) stays
    /// zero. The gradients of runners-up do not see the logit; in
    /// [`Attention::forward_with_sink`](crate::Attention::forward_with_sink) they do.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_flash_dma::{Attention, learnable_sink};
    ///
    /// let device = Device::flex();
    /// let rows = || Tensor::<4>::random([1, 2, 10, 16], Distribution::Normal(0.0, 1.0), &device);
    /// let (out, lse) = Attention::new(rows(), rows(), rows()).forward_with_lse();
    /// // One head leaves its keys nearly all weight, the other nearly none.
    /// let logits = Tensor::from_floats([-20.0, 20.0], &device);
    /// let (shared, _) = learnable_sink(out.clone(), lse, logits);
    /// let change = (shared - out.clone()).abs();
    /// assert!(change.clone().narrow(1, 0, 1).max().into_scalar::<f32>() < 1e-5);
    /// let all = out.abs() - change;
    /// assert!(all.narrow(1, 1, 1).max().into_scalar::<f32>() < 1e-5);
    /// # }
    /// ```
    pub fn learnable_sink(
        out: Tensor<4>, lse: Tensor<3>, logits: Tensor<1>
    ) -> (Tensor<4>, Tensor<3>) = try_learnable_sink;
}

/// Checks for one logit per query head on this device, and casts to f32.
pub(super) fn checked_logits(
    logits: Tensor<1>,
    heads: usize,
    device: &Device,
) -> Result<Tensor<1>, AttentionError> {
    check_shape(TensorName::SinkLogits, &logits.dims(), &[heads])?;
    same_device(device, TensorName::SinkLogits, logits.device())?;
    as_f32(TensorName::SinkLogits, logits)
}

/// Like [`learnable_sink`], but returns the error.
///
/// # Errors
///
/// [`AttentionError::Shape`], [`AttentionError::ElementType`] or [`AttentionError::Device`] if the tensors do not fit;
/// nothing is computed then.
pub fn try_learnable_sink(
    out: Tensor<4>,
    lse: Tensor<3>,
    logits: Tensor<1>,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let (shape @ [_, heads, _, _], device) = (out.dims(), out.device());
    let element = element_type(TensorName::Out, &out)?;
    computes_in(&device, out.dtype(), element)?;
    check_shape(TensorName::Lse, &lse.dims(), &shape[..3])?;
    check_element(TensorName::Lse, &lse, ElementType::F32)?;
    same_device(&device, TensorName::Lse, lse.device())?;
    let logits = checked_logits(logits, heads, &device)?;
    if shape.contains(&0) {
        // Burn cannot reshape empty tensors. The logits still have a gradient, of zeros.
        let nothing = logits.sum() * 0.0;
        let of_rows = nothing.clone().reshape([1; 4]).cast(out.dtype());
        return Ok((out + of_rows, lse + nothing.reshape([1; 3])));
    }
    let (share, all) = sink::shares::<Dispatch>(lse.into_dispatch(), logits.into_dispatch());
    let share = Tensor::<4>::from_dispatch(share).cast(out.dtype());
    Ok((out * share, Tensor::from_dispatch(all)))
}
