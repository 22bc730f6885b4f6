//! The attention layer over a cache: the last rows of the training-time forward pass.

use crate::case::values;
use burn::module::Module;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, DynamicMaskInput, ScoreForm};
use burn_flash_dma::{AttentionError, Documents, ScoreRole};

fn config() -> DynamicMaskAttentionConfig {
    DynamicMaskAttentionConfig::new(32, 4)
        .with_n_kv_heads(Some(2))
        .with_keep_window(Some(5))
        .with_max_seq_len(Some(64))
        .with_score_form(ScoreForm::Zoh)
        .with_score_role(Some(ScoreRole::RankAndBias))
}

fn input(batch: usize, len: usize, device: &Device) -> Tensor<3> {
    Tensor::random([batch, len, 32], Distribution::Normal(0.0, 1.0), device)
}

fn close(actual: Tensor<3>, expected: Tensor<3>, what: &str) {
    let (actual, expected) = (values(actual), values(expected));
    assert_eq!(actual.len(), expected.len());
    for (index, (a, e)) in actual.iter().zip(&expected).enumerate() {
        assert!(
            (a - e).abs() < 2e-6,
            "{what}, element {index}: {a} is not {e}"
        );
    }
}

#[test]
fn steps_equal_the_forward_pass_with_every_option() {
    let device = Device::flex();
    for (name, config) in [
        ("window", config()),
        (
            "the default",
            DynamicMaskAttentionConfig::new(32, 4).with_keep_window(Some(5)),
        ),
        (
            "the default, every key",
            DynamicMaskAttentionConfig::new(32, 4),
        ),
        (
            "no position",
            config().with_max_seq_len(None).with_qk_norm(false),
        ),
        ("every key", config().with_keep_window(None)),
        (
            "capped",
            config().with_head_dim(Some(16)).with_softcap(Some(5.0)),
        ),
        ("one kv head", config().with_n_kv_heads(Some(1))),
        ("a learnable sink", config().with_learnable_sink(true)),
        (
            "a learnable sink, every key",
            (config().with_learnable_sink(true)).with_keep_window(None),
        ),
        ("linear", config().with_score_form(ScoreForm::Linear)),
        (
            "linear, every key",
            (config().with_score_form(ScoreForm::Linear)).with_keep_window(None),
        ),
        (
            "only ranked",
            (config().with_score_role(Some(ScoreRole::Rank))).with_score_form(ScoreForm::Linear),
        ),
        (
            "only ranked, recent and sinks",
            (config().with_score_role(Some(ScoreRole::Rank)))
                .with_recent(Some(2))
                .with_sinks(Some(1)),
        ),
        (
            "only ranked, with a recency slope",
            (config().with_score_role(Some(ScoreRole::Rank))).with_recency_slope(Some(0.2)),
        ),
        (
            "only ranked, every key",
            (config().with_score_role(Some(ScoreRole::Rank))).with_keep_window(None),
        ),
        ("scaled", config().with_scale(Some(1.5))),
        ("recent", config().with_recent(Some(2))),
        ("sinks", config().with_sinks(Some(2))),
        (
            "recent and sinks",
            config().with_recent(Some(3)).with_sinks(Some(2)),
        ),
        ("sliding", config().with_recent(Some(5))),
        ("biases", config().with_bias(true)),
    ] {
        let layer = config.init(&device);
        let x = input(2, 50, &device);
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

/// Sequences of different lengths each go on at their own position.
#[test]
fn a_sequence_that_begins_anew_begins_at_position_zero() {
    let ranked = config().with_score_role(Some(ScoreRole::Rank));
    for config in [config(), ranked.with_recency_slope(Some(0.2))] {
        one_begins_anew(&config);
    }
}

fn one_begins_anew(config: &DynamicMaskAttentionConfig) {
    let device = Device::flex();
    let layer = config.init(&device);
    let (old, new) = (input(2, 20, &device), input(2, 9, &device));
    let mut cache = layer.init_cache(2);
    let _ = layer.forward_cached(old.clone(), &mut cache);
    cache.reset(1);
    let mut step = |at, count| layer.forward_cached(new.clone().narrow(1, at, count), &mut cache);
    let out = Tensor::cat(vec![step(0, 4), step(4, 1), step(5, 1), step(6, 3)], 1);
    let continued = Tensor::cat(vec![old.narrow(0, 0, 1), new.clone().narrow(0, 0, 1)], 1);
    let continued = layer.forward(continued).narrow(1, 20, 9);
    close(out.clone().narrow(0, 0, 1), continued, "continued");
    close(
        out.narrow(0, 1, 1),
        layer.forward(new.narrow(0, 1, 1)),
        "anew",
    );
    assert_eq!(cache.lengths(), [29, 9]);
}

/// A document that ends resets the cache, and the next one goes on like documents in one pass.
#[test]
fn documents_restart_the_cache() {
    let device = Device::flex();
    let layer = config()
        .with_recent(Some(2))
        .with_sinks(Some(1))
        .with_max_seq_len(None)
        .init(&device);
    let lengths = [vec![17, 1, 22, 10], vec![20, 8, 2, 20]];
    let x = input(2, 50, &device);
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

/// Past the rotary table the angles are those that a longer table would hold, bit for bit.
#[test]
fn positions_may_pass_the_rotary_table() {
    let device = Device::flex();
    let long = config().init(&device);
    let record = long.clone().into_record();
    let short = config()
        .with_max_seq_len(Some(16))
        .init(&device)
        .load_record(record);
    let x = input(1, 60, &device);
    let (mut left, mut right) = (long.init_cache(1), short.init_cache(1));
    for (at, count) in [(0, 10), (10, 10), (20, 39), (59, 1)] {
        let x = x.clone().narrow(1, at, count);
        let out = short.forward_cached(x.clone(), &mut right);
        assert_eq!(
            values(long.forward_cached(x, &mut left)),
            values(out),
            "from {at}"
        );
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
    let dense = config().with_keep_window(None).init(&device);
    assert!(matches!(dense.init_cache(3), AttentionCache::Paged(_)));
    let full = config().with_causal(false).init(&device);
    assert_eq!(
        full.try_init_cache(1).unwrap_err(),
        AttentionError::CacheNotCausal
    );
}

#[test]
fn a_layer_in_training_is_refused() {
    let device = Device::flex().autodiff();
    let layer = config().init(&device);
    let mut cache = layer.init_cache(2);
    let error = layer
        .try_forward_cached(input(2, 3, &device), &mut cache)
        .unwrap_err();
    assert!(matches!(error, AttentionError::Tracked { .. }), "{error}");
    assert_eq!(cache.lengths(), [0, 0]);
    // What a model hands out for validation has no gradients.
    let layer = layer.valid();
    let mut cache = layer.init_cache(2);
    let x = input(2, 3, &Device::flex());
    let out = layer.forward_cached(x.clone(), &mut cache);
    close(out, layer.forward(x), "valid");
}

#[test]
fn a_layer_in_16_bits_has_a_cache_in_16_bits() {
    use burn::module::{ModuleMapper, Param};
    struct Cast;
    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.cast(DType::BF16))
        }
    }
    let device = Device::flex();
    let layer = config().init(&device).map(&mut Cast);
    let x = input(1, 30, &device).cast(DType::BF16);
    let whole = values(layer.forward(x.clone()));
    let mut cache = layer.init_cache(1);
    assert_eq!(cache.bytes(), 2 * 5 * (2 * 8 * 2 + 8) + 4);
    let mut out = Vec::new();
    for at in 0..30 {
        out.extend(values(
            layer.forward_cached(x.clone().narrow(1, at, 1), &mut cache),
        ));
    }
    // The two round their matrix products apart.
    for (a, e) in out.iter().zip(&whole) {
        assert!((a - e).abs() < 2e-3, "{a} is not {e}");
    }
}
