//! What layers and functions refuse with an error that says what is wrong.

use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use burn_flash_dma::cache::{
    DynamicMaskCache, DynamicMaskCacheConfig, DynamicMaskCacheRecord, PagedCacheConfig,
    try_overwrite,
};
use burn_flash_dma::nn::mha::{MhaCache, MhaInput, MultiHeadAttentionConfig};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskCrossAttentionConfig,
    MaskedAttentionLayerConfig, Scorer,
};
use burn_flash_dma::{
    Attention, AttentionError, AttentionOptions, RankSoftmax, TensorName, select, try_linear,
    try_split_heads,
};

const WIDTH: usize = 16;

fn x(width: usize) -> Tensor<3> {
    Tensor::ones([2, 3, width], &Device::flex())
}

/// The error that says which type tokens must have.
fn tokens_must_be(expected: &str, actual: &str) -> AttentionError {
    AttentionError::ElementType {
        tensor: TensorName::Tokens,
        expected: expected.into(),
        actual: actual.into(),
    }
}

#[test]
fn a_step_of_another_width_is_refused_and_leaves_the_cache() {
    let layer = DynamicMaskAttentionConfig::new(WIDTH, 2);
    for window in [None, Some(4)] {
        let layer = layer.clone().with_keep_window(window).init(&Device::flex());
        let mut cache = layer.init_cache(2);
        let error = layer.try_forward_cached(x(8), &mut cache).unwrap_err();
        assert_eq!(
            error,
            AttentionError::Shape {
                tensor: TensorName::Tokens,
                axis: 2,
                expected: WIDTH,
                actual: 8
            }
        );
        assert_eq!(cache.lengths(), [0, 0]);
    }
}

#[test]
fn tokens_in_f64_are_refused_by_name() {
    let device = Device::flex();
    let wide = x(WIDTH).cast(DType::F64);
    let expected = tokens_must_be("f32, f16 or bf16", "f64");
    for norm in [false, true] {
        let layer = DynamicMaskAttentionConfig::new(WIDTH, 2)
            .with_keep_window(Some(2))
            .with_qk_norm(norm)
            .init(&device);
        let refused = |error: AttentionError| assert_eq!(error, expected);
        let scores = Tensor::zeros([2, 2, 3], &device);
        refused(layer.try_forward(wide.clone()).unwrap_err());
        refused(layer.try_scores(wide.clone()).unwrap_err());
        refused(layer.try_selection(wide.clone()).unwrap_err());
        refused(layer.try_forward_and_intervals(wide.clone()).unwrap_err());
        refused((layer.try_forward_with_scores(wide.clone(), scores.clone())).unwrap_err());
        refused((layer.try_forward_with_intervals(wide.clone(), &select(scores, 2))).unwrap_err());
        let mut cache = layer.init_cache(2);
        refused((layer.try_forward_cached(wide.clone(), &mut cache)).unwrap_err());

        let layer = DynamicMaskCrossAttentionConfig::new(WIDTH, 2)
            .with_qk_norm(norm)
            .init(&device);
        refused(layer.try_forward(wide.clone(), x(WIDTH)).unwrap_err());
        refused(layer.try_forward(x(WIDTH), wide.clone()).unwrap_err());
        let layer = MaskedAttentionLayerConfig::new(WIDTH, 2)
            .with_qk_norm(norm)
            .init(&device);
        refused(layer.try_forward(wide.clone()).unwrap_err());
    }
    let layer = MultiHeadAttentionConfig::new(WIDTH, 2).init(&device);
    let input = MhaInput::self_attn(wide.clone());
    let error = layer.try_forward(input).unwrap_err();
    assert_eq!(error.to_string(), "q must be f32, f16 or bf16, but is f64");
}

#[test]
fn a_linear_layer_of_another_type_refuses_f64() {
    let device = Device::flex();
    let layer = LinearConfig::new(WIDTH, 4).init(&device);
    let wide = x(WIDTH).cast(DType::F64);
    let error = try_linear(&layer, wide.clone()).unwrap_err();
    assert_eq!(error, tokens_must_be("f32", "f64"));
    let mut layer = layer;
    layer.weight = layer.weight.map(|weight| weight.cast(DType::F64));
    layer.bias = layer
        .bias
        .map(|bias| bias.map(|bias| bias.cast(DType::F64)));
    let error = try_linear(&layer, x(WIDTH)).unwrap_err();
    assert_eq!(error, tokens_must_be("f64", "f32"));
    let error = try_linear(&layer, x(8).cast(DType::F64)).unwrap_err();
    assert!(matches!(error, AttentionError::Shape { .. }), "{error}");
    // Two of one type are Burn's to multiply.
    assert_eq!(try_linear(&layer, wide).unwrap().dims(), [2, 3, 4]);
}

#[test]
fn tokens_of_another_type_than_the_norms_are_to_blame() {
    let device = Device::flex();
    let half = x(WIDTH).cast(DType::F16);
    let expected = tokens_must_be("f32", "f16");
    let layer = DynamicMaskAttentionConfig::new(WIDTH, 2).init(&device);
    assert_eq!(layer.try_forward(half.clone()).unwrap_err(), expected);
    let mut cache = layer.init_cache(2);
    let error = layer.try_forward_cached(half.clone(), &mut cache);
    assert_eq!(error.unwrap_err(), expected);
    let layer = MaskedAttentionLayerConfig::new(WIDTH, 2).init(&device);
    assert_eq!(layer.try_forward(half.clone()).unwrap_err(), expected);
    let layer = DynamicMaskCrossAttentionConfig::new(WIDTH, 2).init(&device);
    let error = layer.try_forward(half.clone(), x(WIDTH)).unwrap_err();
    assert_eq!(error, expected);
    assert_eq!(layer.try_keys(half.clone()).unwrap_err(), expected);
    // Without a norm there is nothing that they differ from: parameters are rounded for the product.
    let layer = MaskedAttentionLayerConfig::new(WIDTH, 2)
        .with_qk_norm(false)
        .init(&device);
    assert_eq!(layer.forward(half).dtype(), DType::F16);
}

#[test]
fn a_rotary_encoding_of_no_positions_or_without_a_base_is_refused() {
    let device = Device::flex();
    let text = |len: usize, theta: f32| {
        format!(
            "a rotary encoding needs at least 1 position and a positive, finite base, but has {len} and {theta}"
        )
    };
    for (len, theta) in [
        (0, 1e4),
        (8, 0.0),
        (8, -1.0),
        (8, f32::NAN),
        (8, f32::INFINITY),
    ] {
        let own = DynamicMaskAttentionConfig::new(WIDTH, 2)
            .with_max_seq_len(Some(len))
            .with_rope_theta(theta);
        assert_eq!(
            own.try_init(&device).unwrap_err().to_string(),
            text(len, theta)
        );
        let masked = MaskedAttentionLayerConfig::new(WIDTH, 2)
            .with_max_seq_len(Some(len))
            .with_rope_theta(theta);
        assert_eq!(
            masked.try_init(&device).unwrap_err().to_string(),
            text(len, theta)
        );
    }
    // The base of no encoding is not read.
    let none = MaskedAttentionLayerConfig::new(WIDTH, 2).with_rope_theta(0.0);
    assert!(none.try_init(&device).is_ok());
    let endless = DynamicMaskAttentionConfig::new(WIDTH, 2).with_max_seq_len(Some(usize::MAX));
    let error = endless.try_init(&device).unwrap_err();
    assert!(matches!(error, AttentionError::TooLarge { .. }), "{error}");
}

#[test]
fn a_rate_of_dropout_that_is_none_is_refused() {
    for rate in [-0.1, 1.0, f64::NAN, f64::INFINITY] {
        let config = MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(rate);
        let error = config.try_init(&Device::flex()).unwrap_err();
        assert!(
            matches!(error, AttentionError::DropoutRate { .. }),
            "{error}"
        );
    }
}

#[test]
fn recent_keys_and_sinks_without_a_window_are_refused() {
    let config = DynamicMaskAttentionConfig::new(WIDTH, 2);
    let text = |recent, sinks| {
        format!(
            "{recent} recent keys and {sinks} sinks are counted in a keep window, but there is none: every key is kept"
        )
    };
    for (recent, sinks) in [(2, 0), (0, 1), (2, 1)] {
        let config = config
            .clone()
            .with_recent(Some(recent))
            .with_sinks(Some(sinks));
        let error = config.try_init(&Device::flex()).unwrap_err();
        assert_eq!(error.to_string(), text(recent, sinks));
        // A window that is widened to all keys in training keeps them for when it shrinks again.
        let mut layer = config.with_keep_window(Some(4)).init(&Device::flex());
        assert!(layer.try_set_keep_window(None).is_ok());
    }
    let none = config.with_recent(Some(0)).with_sinks(Some(0));
    assert!(none.try_init(&Device::flex()).is_ok());
}

#[test]
fn no_error_prints_a_number_that_stands_for_all() {
    let device = Device::flex();
    let rows = |len| Tensor::<4>::zeros([1, 2, len, 8], &device);
    let scores = Tensor::<3>::zeros([1, 2, 3], &device);
    let error = Attention::new(rows(3), rows(3), rows(3))
        .intervals(&select(scores, usize::MAX))
        .options(AttentionOptions::new().with_keep_window(2))
        .try_forward()
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the options keep 2 keys, but the intervals were selected for all"
    );
    let error = AttentionError::TooLarge {
        what: "the size of q in bytes",
        size: usize::MAX,
        limit: 7,
    };
    assert_eq!(
        error.to_string(),
        "the size of q in bytes is more than can be counted, past the limit of 7"
    );
}

#[test]
fn layers_whose_weights_cannot_be_addressed_are_refused() {
    let device = Device::flex();
    let refused = |error: AttentionError| {
        let text = error.to_string();
        assert!(
            text.starts_with("the size of a weight in bytes is"),
            "{text}"
        );
    };
    let width = usize::MAX / 64;
    let own = DynamicMaskAttentionConfig::new(width, 2).with_head_dim(Some(8));
    refused(own.try_init(&device).unwrap_err());
    let masked = MaskedAttentionLayerConfig::new(width, 2).with_head_dim(Some(8));
    refused(masked.try_init(&device).unwrap_err());
    let cross = DynamicMaskCrossAttentionConfig::new(16, 2).with_d_context(Some(width));
    refused(cross.try_init(&device).unwrap_err());
    let mha = MultiHeadAttentionConfig::new(1 << 40, 1 << 37);
    refused(mha.try_init(&device).unwrap_err());
}

#[test]
fn parts_that_add_up_to_more_than_can_be_counted_are_refused() {
    let x = Tensor::<4>::zeros([1, 2, 0, 8], &Device::flex());
    let error = try_split_heads(x, [usize::MAX, 1]).unwrap_err();
    assert!(matches!(error, AttentionError::Shape { .. }), "{error}");
}

#[test]
fn a_step_of_multi_head_attention_in_another_type_is_refused_and_leaves_the_cache() {
    let layer = MultiHeadAttentionConfig::new(WIDTH, 2).init(&Device::flex());
    let mut cache = MhaCache::autoregressive();
    let first = MhaInput::self_attn(x(WIDTH));
    let _ = layer.forward_cache(first, &mut cache);
    let more = Tensor::<3>::ones([2, 4, WIDTH], &Device::flex());
    let half = more.clone().cast(DType::F16);
    let error = layer.try_forward_cache(
        MhaInput::new(more.clone(), more.clone(), half.clone()),
        &mut cache,
    );
    assert_eq!(error.unwrap_err().to_string(), "v must be f32, but is f16");
    let error = layer.try_forward_cache(MhaInput::self_attn(half), &mut cache);
    assert_eq!(error.unwrap_err().to_string(), "q must be f32, but is f16");
    let output = layer.forward_cache(MhaInput::self_attn(more), &mut cache);
    assert_eq!(output.context.dims(), [2, 4, WIDTH]);
}

#[test]
fn caches_that_cannot_be_addressed_are_refused_before_memory_is_taken() {
    let device = Device::flex();
    let pages = |batch| PagedCacheConfig::new(batch, 2, 8, 64).with_page_len(16);
    for batch in [usize::MAX, i32::MAX as usize] {
        let error = pages(batch).try_init(&device).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("the size of the page table is"), "{text}");
    }
    let options = AttentionOptions::new().with_keep_window(4);
    let slots = DynamicMaskCacheConfig::new(0, usize::MAX, 8, options);
    let error = slots.try_init(&device).unwrap_err();
    assert!(matches!(error, AttentionError::TooLarge { .. }), "{error}");

    // A pool that is to grow by more pages than can be counted.
    let mut cache = pages(1).with_grow_by(usize::MAX).init(&device);
    let kv = || Tensor::<4>::ones([1, 2, 20, 8], &device);
    let error = cache.try_append(kv(), kv(), None).unwrap_err();
    assert!(matches!(error, AttentionError::TooLarge { .. }), "{error}");
    assert_eq!(cache.lengths(), [0]);

    // A record whose configuration is damaged.
    let cache = DynamicMaskCacheConfig::new(1, 2, 8, options).init(&device);
    let mut saved = serde_json::to_value(cache.to_record_sync()).unwrap();
    saved["config"]["batch"] = (1u64 << 40).into();
    let record: DynamicMaskCacheRecord = serde_json::from_value(saved).unwrap();
    let error = DynamicMaskCache::try_from_record(record, &device).unwrap_err();
    assert!(matches!(error, AttentionError::Record { .. }), "{error}");
}

#[test]
fn tokens_on_a_device_with_autodiff_are_overwritten() {
    let device = Device::flex().autodiff();
    let tokens = Tensor::<1, Int>::zeros([3], (&device, DType::I32));
    let tokens = try_overwrite(tokens, &[4, 5, 6]).unwrap();
    assert_eq!(tokens.device(), device);
    assert_eq!(
        tokens.into_data().iter::<i32>().collect::<Vec<_>>(),
        [4, 5, 6]
    );
}

#[test]
fn a_selection_with_a_softmax_of_ranks_serves_a_pass_behind_a_backward_pass() {
    let device = Device::flex().autodiff();
    let layer = DynamicMaskAttentionConfig::new(WIDTH, 2)
        .with_keep_window(Some(4))
        .with_runners_up(Some(2))
        .with_rank_softmax(RankSoftmax::new(1.0).ok())
        .init(&device);
    let x = Tensor::<3>::random([1, 12, WIDTH], Distribution::Default, &device);
    let (out, intervals) = layer.forward_and_intervals(x.clone());
    let first = scorer_gradient(&layer, out);
    let again = layer.forward_with_intervals(x, &intervals);
    assert_eq!(scorer_gradient(&layer, again), first);
}

/// The gradient of the projection that makes a layer's scores.
fn scorer_gradient(layer: &DynamicMaskAttention, out: Tensor<3>) -> Vec<f32> {
    let Scorer::Linear(linear) = layer.scorer() else {
        panic!("scores are linear by default");
    };
    let grads = out.powi_scalar(2).sum().backward();
    let grad = linear.score_proj.val().grad(&grads).expect("it learns");
    grad.into_data().iter().collect()
}
