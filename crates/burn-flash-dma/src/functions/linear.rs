//! Linear scores, computed from the tokens of a layer.

use crate::functions::product::try_product;
use crate::validate::{as_f32, check_shape, same_device};
use burn::tensor::{DType, Tensor};
use flash_dma_problem::{AttentionError, TensorName};

/// The factor of [`linear_scores`]. With it a projection that starts at N(0, 0.02²) gives scores of standard deviation
/// `0.2 * sqrt(d_model)` over normalised tokens, and an optimiser's step changes them ten times as much.
const SHARPNESS: f32 = 10.0;

twin! {
    /// The importance of each key as a linear function of its token: `10 * (tokens . score_proj)`.
    ///
    /// `tokens` is `[batch, len, d_model]`, normalised as a layer gets them; `score_proj` `[d_model, kv_heads]`, to be
    /// started at N(0, 0.02²); the result is `[batch, kv_heads, len]`, computed in f32: in 16 bits dozens of keys would tie
    /// at the threshold of a selection. Differentiable in both; an empty result is a constant to autodiff.
    pub fn linear_scores(tokens: Tensor<3>, score_proj: Tensor<2>) -> Tensor<3> = try_linear_scores;
}

/// Like [`linear_scores`], but returns the error.
///
/// # Errors
///
/// [`AttentionError`] if the shapes do not fit, a tensor is not f32, f16 or bf16, or the tensors are
/// on different devices.
pub fn try_linear_scores(
    tokens: Tensor<3>,
    score_proj: Tensor<2>,
) -> Result<Tensor<3>, AttentionError> {
    Ok(try_products(tokens, score_proj)? * SHARPNESS)
}

/// The scores without their factor.
pub(crate) fn try_products(
    tokens: Tensor<3>,
    score_proj: Tensor<2>,
) -> Result<Tensor<3>, AttentionError> {
    let ([batch, len, width], [_, heads]) = (tokens.dims(), score_proj.dims());
    let projection = TensorName::ScoreProjection;
    check_shape(projection, &score_proj.dims(), &[width, heads])?;
    same_device(&tokens.device(), projection, score_proj.device())?;
    let tokens = as_f32(TensorName::Tokens, tokens)?;
    let score_proj = as_f32(projection, score_proj)?;

    if batch * len == 0 {
        // An empty product is not every backend's.
        let options = (&tokens.device(), DType::F32);
        return Ok(Tensor::zeros([batch, heads, len], options));
    }
    Ok(try_product(tokens, score_proj)?.swap_dims(1, 2))
}
