//! The attention layer over a cache: the last rows of the training-time forward pass.

use crate::case::{refused, values, within};
use crate::layer::{self, Groups, WIDTH, cast, like, tokens_for as input};
use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::Documents;
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, DynamicMaskInput, QkNorm, Rope, Scores};

fn config() -> DynamicMaskAttentionConfig {
    layer::config()
        .with_rope(Some(Rope::new(64)))
        .with_scores(Scores::Dma)
}

fn close(actual: Tensor<3>, expected: Tensor<3>, what: &str) {
    within(&values(actual), &values(expected), 2e-6, what);
}

#[test]
fn steps_equal_the_forward_pass_with_every_option() {
    let new = || DynamicMaskAttentionConfig::new(WIDTH, 4);
    let linear = || config().with_scores(Scores::Added);
    let ranked = || config().with_scores(Scores::Ranking);
    let sink = || config().logits(|l| l.with_sink(true));
    let bare = config().with_rope(None).with_qk_norm(QkNorm::None);
    let capped = config()
        .with_head_dim(Some(16))
        .logits(|l| l.with_softcap(Some(5.0)));
    let both = config().selection(|s| s.with_recent(Some(3)).with_sinks(2));
    let ranked_both = ranked().selection(|s| s.with_recent(Some(2)).with_sinks(1));
    for (name, config) in [
        ("window", config()),
        ("the default", new().selection(|s| s.with_window(Some(5)))),
        ("the default, every key", new()),
        ("no position and no norms", bare),
        ("every key", config().selection(|s| s.with_window(None))),
        ("wide heads, capped", capped),
        ("one kv head", config().with_n_kv_heads(Some(1))),
        ("a learnable sink", sink()),
        (
            "a sink, every key",
            sink().selection(|s| s.with_window(None)),
        ),
        ("linear", linear()),
        (
            "linear, every key",
            linear().selection(|s| s.with_window(None)),
        ),
        ("ranked", ranked()),
        ("ranked, recent and sinks", ranked_both),
        (
            "ranked, no head by position",
            ranked().selection(|s| s.with_recency(false)),
        ),
        (
            "ranked, every key",
            ranked().selection(|s| s.with_window(None)),
        ),
        ("scaled", config().logits(|l| l.with_scale(Some(1.5)))),
        ("recent", config().selection(|s| s.with_recent(Some(2)))),
        ("sinks", config().selection(|s| s.with_sinks(2))),
        ("recent and sinks", both),
        ("sliding", config().selection(|s| s.with_recent(Some(5)))),
        ("biases", config().with_bias(true)),
    ] {
        let layer = config.init(&Device::flex());
        let x = input(&layer, 2, 50);
        let whole = layer.forward(x.clone());
        let mut cache = layer.init_cache(2);
        let mut at = 0;
        for count in [22, 1, 1, 3, 1, 16, 1, 5] {
            let out = layer.forward_cached(x.clone().narrow(1, at, count), &mut cache);
            close(out, whole.clone().narrow(1, at, count), name);
            at += count;
        }
        assert_eq!(cache.lengths(), [50, 50]);
    }
}

/// Sequences of different lengths each continue at their own position.
#[test]
fn a_sequence_that_begins_anew_begins_at_position_zero() {
    let ranked = config().with_scores(Scores::Ranking);
    for config in [config(), ranked] {
        let layer = config.init(&Device::flex());
        let (old, new) = (input(&layer, 2, 20), input(&layer, 2, 9));
        let mut cache = layer.init_cache(2);
        let _ = layer.forward_cached(old.clone(), &mut cache);
        cache.reset(1);
        let mut step = |at, count| {
            let x = new.clone().narrow(1, at, count);
            layer.forward_cached(x, &mut cache)
        };
        let out = Tensor::cat(vec![step(0, 4), step(4, 1), step(5, 1), step(6, 3)], 1);
        let of = |tensor: &Tensor<3>, sequence| tensor.clone().narrow(0, sequence, 1);
        let continued = Tensor::cat(vec![of(&old, 0), of(&new, 0)], 1);
        let continued = layer.forward(continued).narrow(1, 20, 9);
        close(of(&out, 0), continued, "continued");
        close(of(&out, 1), layer.forward(of(&new, 1)), "anew");
        assert_eq!(cache.lengths(), [29, 9]);
    }
}

/// Resetting the cache where a document ends equals packed documents in one pass.
#[test]
fn documents_restart_the_cache() {
    let layer = config()
        .selection(|s| s.with_recent(Some(2)).with_sinks(1))
        .with_rope(None)
        .init(&Device::flex());
    let lengths = [vec![17, 1, 22, 10], vec![20, 8, 2, 20]];
    let x = input(&layer, 2, 50);
    let documents =
        DynamicMaskInput::new(x.clone()).documents(Documents::from_lengths(lengths.clone()));
    let whole = layer.forward(documents);
    let mut cache = layer.init_cache(2);
    let starts = lengths.map(|lengths| {
        let ends = lengths.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        ends.collect::<Vec<usize>>()
    });
    for at in 0..50 {
        for (sequence, starts) in starts.iter().enumerate() {
            if starts.contains(&at) {
                cache.reset(sequence);
            }
        }
        let out = layer.forward_cached(x.clone().narrow(1, at, 1), &mut cache);
        close(out, whole.clone().narrow(1, at, 1), &format!("token {at}"));
    }
}

/// Past the rotary table the angles are those of a longer table, bit for bit.
#[test]
fn positions_may_pass_the_rotary_table() {
    let long = config().init(&Device::flex());
    let short = like(&long, &config().with_rope(Some(Rope::new(16))));
    let x = input(&long, 1, 60);
    let (mut left, mut right) = (long.init_cache(1), short.init_cache(1));
    for (at, count) in [(0, 10), (10, 10), (20, 39), (59, 1)] {
        let x = x.clone().narrow(1, at, count);
        let out = short.forward_cached(x.clone(), &mut right);
        let expected = values(long.forward_cached(x, &mut left));
        assert_eq!(expected, values(out), "from {at}");
    }
    let (mut left, mut right) = (long.init_cache(1), short.init_cache(1));
    let out = short.forward_cached(x.clone(), &mut right);
    assert_eq!(values(long.forward_cached(x, &mut left)), values(out));
}

#[test]
fn the_cache_follows_the_layer() {
    let device = Device::flex();
    let layer = config().init(&device);
    let cache = layer.init_cache(3);
    assert!(matches!(cache, AttentionCache::DynamicMask(_)));
    assert_eq!(cache.bytes(), 3 * 2 * 5 * (2 * 8 * 4 + 8) + 3 * 4);
    let dense = config().selection(|s| s.with_window(None)).init(&device);
    assert!(matches!(dense.init_cache(3), AttentionCache::Paged(_)));
    let full = config().logits(|l| l.with_causal(false)).init(&device);
    refused(full.try_init_cache(1), "CacheNotCausal");
}

#[test]
fn a_layer_in_training_is_refused() {
    let layer = config().init(&Device::flex().autodiff());
    let mut cache = layer.init_cache(2);
    let x = input(&layer, 2, 3);
    refused(layer.try_forward_cached(x, &mut cache), "Tracked");
    assert_eq!(cache.lengths(), [0, 0]);
    // A model for validation has no gradients.
    let layer = layer.valid();
    let mut cache = layer.init_cache(2);
    let x = input(&layer, 2, 3);
    let out = layer.forward_cached(x.clone(), &mut cache);
    close(out, layer.forward(x), "valid");
}

#[test]
fn a_layer_in_16_bits_has_a_cache_in_16_bits() {
    let layer = cast(config().init(&Device::flex()), DType::BF16);
    let x = input(&layer, 1, 30).cast(DType::BF16);
    let whole = values(layer.forward(x.clone()));
    let mut cache = layer.init_cache(1);
    assert_eq!(cache.bytes(), 2 * 5 * (2 * 8 * 2 + 8) + 4);
    let steps = (0..30).map(|at| layer.forward_cached(x.clone().narrow(1, at, 1), &mut cache));
    let steps = Tensor::cat(steps.collect(), 1);
    // The matrix products of the two round differently.
    within(&values(steps), &whole, 2e-3, "steps");
}
