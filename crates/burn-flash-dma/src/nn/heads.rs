//! Splitting, encoding and merging of heads, and checks, shared by the attention layers.

use super::config::{QkNorm, Rope};
use crate::fallback::running::arange;
use crate::functions::norm::{HeadEncoding, check_gamma};
use crate::functions::product::try_linear;
use crate::validate::{at_most, element_type};
use burn::module::Initializer;
use burn::nn::{
    Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig,
};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use flash_dma_problem::{AttentionError, AttentionOptions, ElementType, Problem, TensorName};

/// `[batch, len, heads * head_dim]` to `[batch, len, heads, head_dim]`.
pub(super) fn split(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [batch, len, width] = x.dims();
    x.reshape([batch, len, heads, width / heads])
}

pub(super) fn project(
    layer: &Linear,
    x: &Tensor<3>,
    heads: usize,
) -> Result<Tensor<4>, AttentionError> {
    Ok(split(try_linear(layer, x.clone())?, heads))
}

/// Normalises `[batch, len, heads, head_dim]` and rotates it by the positions from `start` on: `[batch, heads, len,
/// head_dim]`.
pub(super) fn encode(
    heads: Tensor<4>,
    norm: &Option<RmsNorm>,
    rope: &Option<RotaryEncoding>,
    start: usize,
) -> Result<Tensor<4>, AttentionError> {
    if norm.is_none() && rope.is_none() {
        return Ok(heads.swap_dims(1, 2));
    }
    let [_, len, _, _] = heads.dims();
    let mut encoding = normalised(heads, norm);
    if let Some(rope) = rope {
        let [table, _, _] = rope.freq_complex.dims();
        encoding = match start + len <= table {
            true => encoding.rotary(rope.freq_complex.clone(), start),
            // Past the end of the table, the angles are computed for this call.
            false => encoding.rotary(frequencies(rope, start, len), 0),
        };
    }
    encoding.try_forward()
}

/// [`encode`] for one token per sequence, rotated by its own angles, `[batch, head_dim, 2]`.
pub(super) fn encode_by(
    heads: Tensor<4>,
    norm: &Option<RmsNorm>,
    angles: &Tensor<3>,
) -> Result<Tensor<4>, AttentionError> {
    // Each sequence has its own angles, so the sequences are passed as tokens of one.
    let encoding = normalised(heads.swap_dims(0, 1), norm).rotary(angles.clone(), 0);
    Ok(encoding.try_forward()?.swap_dims(0, 2))
}

fn normalised(heads: Tensor<4>, norm: &Option<RmsNorm>) -> HeadEncoding {
    let encoding = HeadEncoding::new(heads);
    match norm {
        Some(norm) => encoding.norm(norm.gamma.val(), norm.epsilon as f32),
        None => encoding,
    }
}

/// `[len, head_dim, 2]`: cosine and sine of each position's angle, twice per pair of features, as in the table.
fn frequencies(rope: &RotaryEncoding, start: usize, len: usize) -> Tensor<3> {
    let device = rope.theta.device();
    let [pairs] = rope.theta.dims();
    // In f32 whatever the device's default: 16 bits hold no position past a few hundred.
    let options = (&device, DType::I32);
    let positions = arange(start as i64..(start + len) as i64, options);
    let positions = positions.cast(FloatDType::F32).reshape([len, 1, 1]);
    let angles: Tensor<3> = positions * rope.theta.clone().reshape([1, pairs, 1]);
    let angles = angles.repeat_dim(2, 2).reshape([len, 2 * pairs, 1]);
    Tensor::cat(vec![angles.clone().cos(), angles.sin()], 2)
}

/// Positions of the first token of each sequence.
#[derive(Clone, Copy)]
pub(super) enum Starts<'a> {
    /// The positions; empty for 0 throughout.
    Positions(&'a [usize]),
    /// The angles of each sequence's single token, `[batch, head_dim, 2]`, whose positions the device counts.
    Angles(&'a Tensor<3>),
}

/// `[batch, heads, len, head_dim]` to `[batch, len, d_model]`, through the last projection.
pub(super) fn merge(out: Tensor<4>, projection: &Linear) -> Result<Tensor<3>, AttentionError> {
    let [batch, heads, len, dim] = out.dims();
    try_linear(
        projection,
        out.swap_dims(1, 2).reshape([batch, len, heads * dim]),
    )
}

/// Refuses tokens whose type attention does not support, or that the heads' norm does not take.
pub(super) fn check_type(x: &Tensor<3>, norm: &Option<RmsNorm>) -> Result<(), AttentionError> {
    match norm {
        Some(norm) => check_gamma(x, &norm.gamma.val()).map(drop),
        None => element_type(TensorName::Tokens, x).map(drop),
    }
}

/// Refuses weights too large to be addressed. They are allocated on first use, which is too late for an error.
pub(super) fn check_weights(features: [usize; 2]) -> Result<(), AttentionError> {
    let [from, to] = features;
    let bytes = from.saturating_mul(to).saturating_mul(size_of::<f32>());
    at_most("the size of a weight in bytes", bytes, isize::MAX as usize)
}

/// The rotary encoding of a configuration, if any.
///
/// # Errors
///
/// [`AttentionError::Rotary`] or [`AttentionError::TooLarge`].
pub(super) fn rotary(
    config: &Option<Rope>,
    head_dim: usize,
    device: &Device,
) -> Result<Option<RotaryEncoding>, AttentionError> {
    let Some(Rope { positions, base }) = *config else {
        return Ok(None);
    };
    if positions == 0 || !(base.is_finite() && base > 0.0) {
        return Err(AttentionError::Rotary { positions, base });
    }
    at_most(
        "the number of rotary positions",
        positions,
        i32::MAX as usize,
    )?;
    let config = RotaryEncodingConfig::new(positions, head_dim).with_theta(base);
    Ok(Some(config.init(device)))
}

pub(super) fn check_positions(
    rope: &Option<RotaryEncoding>,
    len: usize,
) -> Result<(), AttentionError> {
    let Some(rope) = rope else { return Ok(()) };
    let [limit, _, _] = rope.freq_complex.dims();
    at_most("the number of tokens with rotary positions", len, limit)
}

/// The norms of q and k. The epsilon must be positive and finite in f32, the type it is used in.
pub(super) fn norms(
    norm: QkNorm,
    head_dim: usize,
    device: &Device,
) -> Result<[Option<RmsNorm>; 2], AttentionError> {
    let QkNorm::Rms(epsilon) = norm else {
        return Ok([None, None]);
    };
    let computed = epsilon as f32;
    if !(computed.is_finite() && computed > 0.0) {
        return Err(AttentionError::Epsilon { epsilon: computed });
    }
    let config = RmsNormConfig::new(head_dim).with_epsilon(epsilon);
    Ok([(); 2].map(|()| Some(config.init(device))))
}

/// Creates the projections of a layer from `[features in, features out]`.
pub(super) fn linears(
    bias: bool,
    initializer: &Initializer,
    device: &Device,
) -> impl Fn(usize, usize) -> Linear {
    move |from, to| {
        LinearConfig::new(from, to)
            .with_bias(bias)
            .with_initializer(initializer.clone())
            .init(device)
    }
}

/// Refuses heads, `[n_heads, n_kv_heads]`, that attention does not support with these options.
pub(super) fn check_heads(
    heads: [usize; 2],
    head_dim: usize,
    scored: bool,
    options: &AttentionOptions,
) -> Result<(), AttentionError> {
    // The rules for one token hold for any length.
    let [q, kv] = heads.map(|heads| [1, heads, 1, head_dim]);
    let scores = scored.then_some(&kv[..3]);
    Problem::new(&q, &kv, &kv, scores, ElementType::F32, options)?;
    Ok(())
}
