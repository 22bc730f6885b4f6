//! Parts of an attention over disjoint keys, merged by their LSEs.

use crate::validate::{check_element, check_shape, computes_in, element_type, same_device};
use burn::tensor::{DType, Tensor};
use flash_dma_problem::{AttentionError, ElementType, TensorName};

twin! {
    /// Merges parts of an attention over disjoint keys, `(out, lse)` each, into the `(out, lse)` over all keys:
    /// `lse = log sum_p exp(lse_p)` and `out = sum_p exp(lse_p - lse) out_p`.
    ///
    /// | tensor | shape | type |
    /// |---|---|---|
    /// | `out` of each part, and of all | `[batch, q_heads, q_len, head_dim]` | f32, f16 or bf16, one for all |
    /// | `lse` of each part, and of all | `[batch, q_heads, q_len]` | f32 |
    ///
    /// Any call that gives an LSE can be a part. Arithmetic is f32, and `out` is rounded once. The ratio of two
    /// parts' weights has the rounding of an f32 LSE: a relative error of 6e-5 at an LSE of 1000, of 6e-2 at 1e6, and
    /// no precision left at 1e9. A row that attends to nothing (an LSE of −∞) has no effect, whatever its `out`; if
    /// that holds in all parts, the result is zeros and −∞.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_flash_dma::{Attention, AttentionOptions, merge_attention};
    ///
    /// let device = Device::flex();
    /// let rows = |heads, len| Tensor::<4>::random([1, heads, len, 16], Distribution::Normal(0.0, 1.0), &device);
    /// // Ten queries over a shared prefix of 50 keys, and causally over their own ten keys.
    /// let (q, prefix, own) = (rows(4, 10), rows(2, 50), rows(2, 10));
    /// let shared = Attention::new(q.clone(), prefix.clone(), prefix.clone());
    /// let shared = shared.options(AttentionOptions::new().with_causal(false)).forward_with_lse();
    /// let rest = Attention::new(q.clone(), own.clone(), own.clone()).forward_with_lse();
    /// let (out, lse) = merge_attention([shared, rest]);
    ///
    /// // One call over both: causal masking is aligned bottom-right.
    /// let keys = Tensor::cat(vec![prefix, own], 2);
    /// let (all, all_lse) = Attention::new(q, keys.clone(), keys).forward_with_lse();
    /// assert!((out - all).abs().max().into_scalar::<f32>() < 1e-5);
    /// assert!((lse - all_lse).abs().max().into_scalar::<f32>() < 1e-5);
    /// # }
    /// ```
    ///
    /// Differentiable in every `out` and every `lse`, with the gradients of one call over all keys. These are plain
    /// Burn operations: under autodiff the graph keeps an f32 copy of each `out`.
    pub fn merge_attention(
        parts: impl IntoIterator<Item = (Tensor<4>, Tensor<3>)>
    ) -> (Tensor<4>, Tensor<3>) = try_merge_attention;
}

/// Like [`merge_attention`], but returns the error.
///
/// # Errors
///
/// [`AttentionError::NoParts`] without parts; [`AttentionError::Shape`], [`AttentionError::ElementType`] or
/// [`AttentionError::Device`] if a part does not fit the first one; nothing is computed then.
pub fn try_merge_attention(
    parts: impl IntoIterator<Item = (Tensor<4>, Tensor<3>)>,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let parts: Vec<_> = parts.into_iter().collect();
    check(&parts)?;
    let (first, _) = &parts[0];
    let (shape, dtype, device) = (first.dims(), first.dtype(), first.device());
    let [batch, heads, len, _] = shape;
    if shape.contains(&0) {
        // Burn reshapes no empty tensors.
        let none = f32::NEG_INFINITY;
        let lse = Tensor::full([batch, heads, len], none, (&device, DType::F32));
        return Ok((Tensor::zeros(shape, (&device, dtype)), lse));
    }
    let columns = |lse: &Tensor<3>| lse.clone().unsqueeze_dim::<4>(3);
    // Subtracting it changes no result, so it needs no gradient.
    let greatest = parts.iter().map(|(_, lse)| columns(lse).detach());
    let greatest = greatest.reduce(Tensor::max_pair).expect("there are parts");
    let none = greatest.clone().equal_elem(f32::NEG_INFINITY);
    let greatest = greatest.mask_fill(none.clone(), 0.0);
    let weight = |(_, lse): &(_, Tensor<3>)| (columns(lse) - greatest.clone()).exp();
    let weights: Vec<_> = parts.iter().map(weight).collect();
    let sum = (weights.iter().cloned().reduce(|a, b| a + b)).expect("there are parts");
    // Avoids a quotient and a logarithm of zero, whose gradients would be NaN.
    let sum = sum.mask_fill(none.clone(), 1.0);
    let weighted = parts.into_iter().zip(weights).map(|((out, lse), weight)| {
        let unseen = lse.equal_elem(f32::NEG_INFINITY).unsqueeze_dim::<4>(3);
        let out = out.cast(DType::F32).mask_fill(unseen.expand(shape), 0.0);
        out * (weight / sum.clone())
    });
    let out = weighted.reduce(|a, b| a + b).expect("there are parts");
    let lse = (sum.log() + greatest).mask_fill(none, f32::NEG_INFINITY);
    Ok((out.cast(dtype), lse.squeeze_dim(3)))
}

fn check(parts: &[(Tensor<4>, Tensor<3>)]) -> Result<(), AttentionError> {
    let (first, _) = parts.first().ok_or(AttentionError::NoParts)?;
    let (shape, device) = (first.dims(), first.device());
    let element = element_type(TensorName::Out, first)?;
    computes_in(&device, first.dtype(), element)?;
    for (out, lse) in parts {
        check_shape(TensorName::Out, &out.dims(), &shape)?;
        check_shape(TensorName::Lse, &lse.dims(), &shape[..3])?;
        check_element(TensorName::Out, out, element)?;
        check_element(TensorName::Lse, lse, ElementType::F32)?;
        same_device(&device, TensorName::Out, out.device())?;
        same_device(&device, TensorName::Lse, lse.device())?;
    }
    Ok(())
}
