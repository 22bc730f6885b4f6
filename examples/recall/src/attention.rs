//! What a layer computes, with its own parameters, from keys and logits that it has not made itself.

use crate::settings::Sizes;
use burn::module::{Module, Param};
use burn::nn::{Linear, RmsNorm};
use burn::tensor::{FloatDType, Tensor};
use burn_flash_dma::nn::DynamicMaskAttention;
use burn_flash_dma::{Attention, AttentionError, HeadEncoding, Intervals, linear};

/// Added to what a query has besides a key, so that the worth of one that has nothing else is finite: 20 times its value.
const BESIDES: f32 = 0.05;

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

/// Zeros in the shape of a layer's output, through which its scores learn what each kept key is worth: the output less
/// what it would be without the key, `p / (1 - p) * (v - out)` for the weight `p`, at every query that keeps it. To a kept
/// key that is what the gradient of a runner-up is to one that is not. Of all pairs, so for short texts.
///
/// # Errors
///
/// [`AttentionError`] if the device fails.
pub(crate) fn hold(
    layer: &DynamicMaskAttention,
    sizes: Sizes,
    x: Tensor<3>,
    kept: &Intervals,
) -> Result<Tensor<3>, AttentionError> {
    hold_beside(layer, sizes, x, kept, BESIDES)
}

/// As [`hold`], where a query has so much besides each key, added to `1 - p`.
fn hold_beside(
    layer: &DynamicMaskAttention,
    sizes: Sizes,
    x: Tensor<3>,
    kept: &Intervals,
    besides: f32,
) -> Result<Tensor<3>, AttentionError> {
    let [batch, len, width] = x.dims();
    let dtype: FloatDType = x.dtype().into();
    let of_query_heads = |x: Tensor<4>| {
        let [_, heads, rows, columns] = x.dims();
        let group = sizes.heads / heads;
        x.reshape([batch, heads, 1, rows, columns])
            .repeat_dim(2, group)
            .reshape([batch, sizes.heads, rows, columns])
    };
    let scores = layer.try_scores(x.clone())?;
    let scores = (scores.clone() - scores.detach()).cast(dtype);
    let scores = of_query_heads(scores.reshape([batch, sizes.kv_heads, 1, len]));

    let (fixed, x) = (layer.clone().no_grad(), x.detach());
    let kept = kept.as_mask(len).float().cast(dtype);
    let [q, k, v] = parts(&fixed, sizes, x)?;
    let (k, v) = (of_query_heads(k), of_query_heads(v));
    // Normalised heads make small logits.
    let scale = ((width / sizes.heads) as f32).sqrt().recip();
    let weights = (q.matmul(k.transpose()) * scale).exp() * of_query_heads(kept);
    let mut all = weights.clone().sum_dim(3);
    if let Some(sink) = fixed.sink_logits.as_ref().map(Param::val) {
        all = all + sink.exp().reshape([1, sizes.heads, 1, 1]);
    }
    let weights = weights / all;
    let out = weights.clone().matmul(v.clone());
    let worth = weights.clone() / (-weights + (1.0 + besides)) * scores;
    let held = worth.clone().matmul(v) - worth.sum_dim(3) * out;
    let held = held.swap_dims(1, 2).reshape([batch, len, width]);
    Ok(linear(&fixed.o_proj, held))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::task::ints;
    use burn::tensor::{Device, Distribution};
    use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Scorer};

    const LEN: usize = 12;
    const SIZES: Sizes = Sizes {
        width: 32,
        layers: 1,
        heads: 4,
        kv_heads: 2,
    };

    fn layer(device: &Device) -> DynamicMaskAttention {
        DynamicMaskAttentionConfig::new(SIZES.width, SIZES.heads)
            .with_n_kv_heads(Some(SIZES.kv_heads))
            .with_max_seq_len(Some(LEN))
            .with_keep_window(Some(3))
            .with_learnable_sink(Some(true))
            .init(device)
    }

    /// By the definition: a loss that is linear in the output changes by a key's worth if the key is left out.
    #[test]
    fn scores_learn_what_the_loss_is_without_each_kept_key() {
        let device = Device::flex().autodiff();
        device.seed(11);
        let layer = layer(&device);
        let random = || Tensor::<3>::random([1, LEN, SIZES.width], Distribution::Default, &device);
        let (x, loss_of) = (random() - 0.5, random() - 0.5);
        let keys = layer.selection(x.clone());
        let held = hold_beside(&layer, SIZES, x.clone(), &keys, 0.0).expect("it fits");
        assert_eq!(held.clone().abs().max().into_scalar::<f32>(), 0.0);
        let Scorer::Linear(scorer) = layer.scorer() else {
            panic!("linear scores are the default");
        };
        let learned = |loss: Tensor<1>| {
            let gradient = scorer.score_proj.val().grad(&loss.backward());
            gradient
                .expect("it is tracked")
                .into_data()
                .iter::<f32>()
                .collect::<Vec<f32>>()
        };
        let ours = learned((held * loss_of.clone()).sum());

        let ends = keys.tensor().clone().narrow(3, 1, 1).into_data();
        let ends: Vec<usize> = ends.iter::<i64>().map(|end| end as usize).collect();
        let loss = |ends: &[usize]| {
            let shape = [1, SIZES.kv_heads, LEN];
            let keys = Intervals::try_from_ends(ints(ends.iter().copied(), shape, &device));
            let keys = keys.expect("good ends");
            let out = attend_to(&layer, SIZES, (Some(keys), None), x.clone()).expect("it fits");
            (out * loss_of.clone()).sum().into_scalar::<f32>()
        };
        let all = loss(&ends);
        let worth = (0..ends.len()).map(|at| {
            let mut without = ends.clone();
            without[at] = at % LEN;
            all - loss(&without)
        });
        let worth: Vec<f32> = worth.collect();
        let worth = Tensor::<1>::from_floats(worth.as_slice(), &device);
        let worth = worth.reshape([1, SIZES.kv_heads, LEN]);
        let expected = learned((layer.scores(x.clone()) * worth).sum());

        let largest = expected.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        assert!(largest > 1e-3, "{largest}");
        for (ours, expected) in ours.iter().zip(expected) {
            assert!(
                (ours - expected).abs() < 1e-3 * largest,
                "{ours} {expected}"
            );
        }
    }
}
