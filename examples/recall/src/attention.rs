//! What a layer computes, with its own parameters, from keys and logits that it has not made itself.

use crate::settings::Sizes;
use burn::module::Param;
use burn::nn::{Linear, RmsNorm};
use burn::tensor::Tensor;
use burn_flash_dma::nn::DynamicMaskAttention;
use burn_flash_dma::{Attention, AttentionError, HeadEncoding, Intervals, linear};

/// q `[batch, heads, len, dim]`, k and v `[batch, kv_heads, len, dim]` of a layer, placed.
fn parts(
    layer: &DynamicMaskAttention,
    sizes: Sizes,
    x: Tensor<3>,
) -> Result<[Tensor<4>; 3], AttentionError> {
    let [batch, len, width] = x.dims();
    let split = |projection: &Linear, heads: usize| {
        let rows = linear(projection, x.clone());
        rows.reshape([batch, len, heads, width / sizes.heads])
    };
    let place = |heads: Tensor<4>, norm: &Option<RmsNorm>| {
        let mut encoding = HeadEncoding::new(heads);
        if let Some(norm) = norm {
            encoding = encoding.norm(norm.gamma.val(), norm.epsilon as f32);
        }
        if let Some(rope) = &layer.rope {
            encoding = encoding.rotary(rope.freq_complex.clone(), 0);
        }
        encoding.try_forward()
    };
    Ok([
        place(split(&layer.q_proj, sizes.heads), &layer.q_norm)?,
        place(split(&layer.k_proj, sizes.kv_heads), &layer.k_norm)?,
        split(&layer.v_proj, sizes.kv_heads).swap_dims(1, 2),
    ])
}

/// A layer's output with these keys, and this added to their logits: what the layer computes otherwise, with its own
/// parameters.
pub(crate) fn attend_to(
    layer: &DynamicMaskAttention,
    sizes: Sizes,
    (keys, bias): (Option<Intervals>, Option<Tensor<3>>),
    x: Tensor<3>,
) -> Result<Tensor<3>, AttentionError> {
    let [batch, len, width] = x.dims();
    let [q, k, v] = parts(layer, sizes, x)?;
    let attention = Attention::new(q, k, v);
    let sink = layer.sink_logits.as_ref().map(Param::val);
    let out = match (keys, bias) {
        (Some(keys), Some(bias)) => beside(sink, attention.scores(bias).intervals(&keys))?,
        (Some(keys), None) => beside(sink, attention.intervals(&keys))?,
        (None, _) => beside(sink, attention)?,
    };
    let out = out.swap_dims(1, 2).reshape([batch, len, width]);
    Ok(linear(&layer.o_proj, out))
}

/// The output of an attention, beside a logit per head without a key if there are any.
fn beside<S>(
    sink: Option<Tensor<1>>,
    attention: Attention<S>,
) -> Result<Tensor<4>, AttentionError> {
    match sink {
        None => attention.try_forward(),
        Some(logits) => Ok(attention.try_forward_with_sink(logits)?.0),
    }
}
