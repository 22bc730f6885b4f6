//! Scores of keys, computed from their values or their tokens.

use crate::engines::has_kernels;
use crate::fallback::tensors::{greatest_divisor, reshaped};
use crate::functions::product::try_product;
use crate::ops::ScoreOps;
use crate::ops::TrainingOps;
use crate::ops::scores::FEW_TOKENS;
use crate::types::OptionalFloat;
use crate::validate::{as_f32, check_shape, element_type, same_device};
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor, activation::softplus};
use flash_dma_problem::{AttentionError, TensorName};

twin! {
    /// Scores of keys from their values: `exp(a * softplus(values . dt_projᵀ))`, with the values of a token's heads
    /// concatenated.
    ///
    /// `values` is `[batch, kv_heads, k_len, head_dim]`, `dt_proj` `[kv_heads, kv_heads * head_dim]`, `a`
    /// `[kv_heads]`; the result is `[batch, kv_heads, k_len]`, always f32. Differentiable in all three; an empty
    /// result is a constant to autodiff. Without autodiff, up to 64 tokens are one kernel on CubeCL's runtimes.
    pub fn zoh_scores(values: Tensor<4>, dt_proj: Tensor<2>, a: Tensor<1>) -> Tensor<3>
        = try_zoh_scores;
}

/// Like [`zoh_scores`], but returns the error.
///
/// # Errors
///
/// [`AttentionError`] if the shapes do not fit, a tensor is not f32, f16 or bf16, or the tensors are on different
/// devices.
pub fn try_zoh_scores(
    values: Tensor<4>,
    dt_proj: Tensor<2>,
    a: Tensor<1>,
) -> Result<Tensor<3>, AttentionError> {
    try_biased_zoh_scores(values, dt_proj, None, a)
}

/// [`try_zoh_scores`] with a bias `[kv_heads]` that is added to the steps before the softplus.
pub(crate) fn try_biased_zoh_scores(
    values: Tensor<4>,
    dt_proj: Tensor<2>,
    bias: Option<Tensor<1>>,
    a: Tensor<1>,
) -> Result<Tensor<3>, AttentionError> {
    let [batch, heads, len, head_dim] = values.dims();
    let width = heads * head_dim;
    check_shape(TensorName::DtProjection, &dt_proj.dims(), &[heads, width])?;
    check_shape(TensorName::Decay, &a.dims(), &[heads])?;
    let device = values.device();
    same_device(&device, TensorName::DtProjection, dt_proj.device())?;
    same_device(&device, TensorName::Decay, a.device())?;
    element_type(TensorName::Value, &values)?;
    element_type(TensorName::DtProjection, &dt_proj)?;
    element_type(TensorName::Decay, &a)?;
    if let Some(bias) = &bias {
        // Errors name the projection, which the bias belongs to.
        check_shape(TensorName::DtProjection, &bias.dims(), &[heads])?;
        same_device(&device, TensorName::DtProjection, bias.device())?;
        element_type(TensorName::DtProjection, bias)?;
    }

    if batch * heads * len == 0 {
        // Burn's `reshape` reads a 0 as "keep the axis".
        return Ok(Tensor::zeros([batch, heads, len], (&device, DType::F32)));
    }
    // More tokens are worth a product's kernel.
    if batch * len <= FEW_TOKENS && takes_few(&values, &dt_proj, bias.as_ref(), &a) {
        let scores = Dispatch::zoh_scores_of_few(
            values.into_dispatch(),
            dt_proj.into_dispatch(),
            OptionalFloat::from_option(bias.map(Tensor::into_dispatch)),
            a.into_dispatch(),
        );
        return Ok(Tensor::from_dispatch(scores));
    }
    let dt_proj = as_f32(TensorName::DtProjection, dt_proj)?;
    let a = as_f32(TensorName::Decay, a)?;
    let bias = bias.map(|bias| as_f32(TensorName::DtProjection, bias));
    let bias = bias.transpose()?;
    // Cast last: otherwise the reshaped cast would be kept for the backward pass.
    let tokens = reshaped(values.swap_dims(1, 2), [batch * len, width]);
    let tokens = as_f32(TensorName::Value, tokens)?;
    let dt = try_product(tokens, dt_proj.transpose())?;
    let dt = match bias {
        None => dt,
        Some(bias) => dt + bias.unsqueeze(),
    };
    // The gradient of `a` is summed within segments and then over them: as one sum over all tokens it would be a
    // single thread's work per head.
    let segments = segments(batch * len);
    let steps = softplus(dt, 1.0).reshape([segments, batch * len / segments, heads]);
    let a = a.reshape([1, 1, heads]).expand([segments, 1, heads]);
    let scores = (steps * a).exp();
    Ok(scores.reshape([batch, len, heads]).swap_dims(1, 2))
}

/// True if one operation computes the scores: it is a kernel on this device, nothing is tracked, and the device
/// supports all the types.
fn takes_few(
    values: &Tensor<4>,
    dt_proj: &Tensor<2>,
    bias: Option<&Tensor<1>>,
    a: &Tensor<1>,
) -> bool {
    let takes = |device: Device, dtype| !device.is_autodiff() && device.supports_dtype(dtype);
    has_kernels(&values.device())
        && takes(values.device(), values.dtype())
        && takes(dt_proj.device(), dt_proj.dtype())
        && takes(a.device(), a.dtype())
        && bias.is_none_or(|bias| takes(bias.device(), bias.dtype()))
}

/// Number of equal segments that `tokens` are split into: about their square root.
fn segments(tokens: usize) -> usize {
    greatest_divisor(tokens, tokens.isqrt())
}

/// Factor of [`linear_scores`]. With it a projection initialised to N(0, 0.02²) gives scores of standard deviation
/// `0.2 * sqrt(d_model)` over normalised tokens, and an optimiser step changes them ten times as much.
const SHARPNESS: f32 = 10.0;

twin! {
    /// Scores of keys as a linear function of their tokens: `10 * (tokens . score_proj)`.
    ///
    /// `tokens` is `[batch, len, d_model]`, normalised as a layer gets them; `score_proj` `[d_model, kv_heads]`, best
    /// initialised to N(0, 0.02²). The result is `[batch, kv_heads, len]`, computed in f32: in 16 bits dozens of keys
    /// would tie at the threshold of a selection. Differentiable in both; an empty result is a constant to autodiff.
    pub fn linear_scores(tokens: Tensor<3>, score_proj: Tensor<2>) -> Tensor<3> = try_linear_scores;
}

/// Like [`linear_scores`], but returns the error.
///
/// # Errors
///
/// [`AttentionError`] if the shapes do not fit, a tensor is not f32, f16 or bf16, or the tensors are on different
/// devices.
pub fn try_linear_scores(
    tokens: Tensor<3>,
    score_proj: Tensor<2>,
) -> Result<Tensor<3>, AttentionError> {
    try_added_scores(tokens, score_proj, true)
}

/// [`try_scores`] times [`SHARPNESS`].
pub(crate) fn try_added_scores(
    tokens: Tensor<3>,
    score_proj: Tensor<2>,
    tokens_learn: bool,
) -> Result<Tensor<3>, AttentionError> {
    Ok(try_scores(tokens, score_proj, tokens_learn)? * SHARPNESS)
}

/// Tokens `[batch, len, d_model]` times a column per head: `[batch, kv_heads, len]` in f32. The projection learns, and the
/// tokens if they are to.
pub(crate) fn try_scores(
    tokens: Tensor<3>,
    score_proj: Tensor<2>,
    tokens_learn: bool,
) -> Result<Tensor<3>, AttentionError> {
    let ([batch, len, width], [_, heads]) = (tokens.dims(), score_proj.dims());
    let projection = TensorName::ScoreProjection;
    check_shape(projection, &score_proj.dims(), &[width, heads])?;
    same_device(&tokens.device(), projection, score_proj.device())?;
    element_type(TensorName::Tokens, &tokens)?;
    let score_proj = as_f32(projection, score_proj)?;
    if batch * len * width * heads == 0 {
        // Not every backend computes an empty product.
        let options = (&tokens.device(), DType::F32);
        return Ok(Tensor::zeros([batch, heads, len], options));
    }
    let directions = score_proj.transpose().into_dispatch();
    let scores = Dispatch::training_scores(tokens.into_dispatch(), directions, tokens_learn);
    Ok(Tensor::from_dispatch(scores))
}

/// Sums of a sequence's tokens `[batch, len, d_model]`, each times its weight in a head, `[batch, kv_heads, len]` in f32:
/// `[batch, kv_heads, d_model]` in f32, without a graph.
#[cfg(feature = "autodiff")]
pub(crate) fn weighted_tokens(tokens: &Tensor<3>, weights: &Tensor<3>) -> Tensor<3> {
    let [batch, heads, _] = weights.dims();
    let [_, _, width] = tokens.dims();
    let sums = (0..batch).map(|sequence| {
        // What the directions of scores learn.
        let own = |numbers: &Tensor<3>| numbers.clone().narrow(0, sequence, 1).into_dispatch();
        let sums = Dispatch::training_scores_gradient(own(tokens), own(weights));
        Tensor::<2>::from_dispatch(sums).reshape([1, heads, width])
    });
    Tensor::cat(sums.collect(), 0)
}

#[cfg(test)]
mod tests {
    use super::segments;

    #[test]
    fn segments_divide_the_tokens() {
        assert_eq!(
            [1, 6, 7, 32768, 3 * 8192].map(segments),
            [1, 2, 1, 128, 128]
        );
    }
}
