//! What layers and functions refuse with an error that says what is wrong.

use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::nn::mha::{MhaInput, MultiHeadAttentionConfig};
use burn_flash_dma::nn::{
    DynamicMaskAttentionConfig, DynamicMaskCrossAttentionConfig, MaskedAttentionLayerConfig,
};
use burn_flash_dma::{Attention, AttentionError, AttentionOptions, TensorName, select, try_linear};

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
