//! Calls that layers and functions refuse with an error that says what is wrong.

use crate::case::{ints, refused, refused_as, uniform};
use crate::layer::{cast, of_scores};
use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_flash_dma::cache::{
    DynamicMaskCache, DynamicMaskCacheConfig, DynamicMaskCacheRecord, PagedCacheConfig,
    try_overwrite,
};
use burn_flash_dma::nn::mha::{MhaCache, MhaInput, MultiHeadAttentionConfig};
use burn_flash_dma::nn::{
    DynamicMaskAttentionConfig, DynamicMaskCrossAttentionConfig, MaskedAttentionLayerConfig,
    QkNorm, Rope, ScoreLearning, Selection,
};
use burn_flash_dma::{
    Attention, AttentionError, AttentionOptions, select, try_linear, try_split_heads,
};

const WIDTH: usize = 16;

fn x(width: usize) -> Tensor<3> {
    Tensor::ones([2, 3, width], &Device::flex())
}

#[test]
fn a_step_of_another_width_is_refused_and_leaves_the_cache() {
    let layer = DynamicMaskAttentionConfig::new(WIDTH, 2);
    for selection in [Selection::new(), Selection::keep(4)] {
        let layer = layer
            .clone()
            .with_selection(selection)
            .init(&Device::flex());
        let mut cache = layer.init_cache(2);
        let step = layer.try_forward_cached(x(8), &mut cache);
        refused_as(step, "x must have size 16 on axis 2, but has 8");
        assert_eq!(cache.lengths(), [0, 0]);
    }
}

#[test]
fn tokens_in_f64_are_refused_by_name() {
    let device = Device::flex();
    let wide = x(WIDTH).cast(DType::F64);
    for norm in [QkNorm::None, QkNorm::default()] {
        let layer = DynamicMaskAttentionConfig::new(WIDTH, 2)
            .with_selection(Selection::keep(2))
            .with_qk_norm(norm)
            .init(&device);
        let scores = Tensor::zeros([2, 2, 3], &device);
        let intervals = select(scores.clone(), 2);
        let mut cache = layer.init_cache(2);
        let wide = || wide.clone();
        let cross = DynamicMaskCrossAttentionConfig::new(WIDTH, 2).with_qk_norm(norm);
        let cross = cross.init(&device);
        let masked = MaskedAttentionLayerConfig::new(WIDTH, 2).with_qk_norm(norm);
        let masked = masked.init(&device);
        for result in [
            layer.try_forward(wide()).map(drop),
            layer.try_scores(wide()).map(drop),
            layer.try_selection(wide()).map(drop),
            layer.try_forward_and_intervals(wide()).map(drop),
            layer.try_forward_with_scores(wide(), scores).map(drop),
            (layer.try_forward_with_intervals(wide(), &intervals)).map(drop),
            layer.try_forward_cached(wide(), &mut cache).map(drop),
            cross.try_forward(wide(), x(WIDTH)).map(drop),
            cross.try_forward(x(WIDTH), wide()).map(drop),
            masked.try_forward(wide()).map(drop),
        ] {
            refused_as(result, "x must be f32, f16 or bf16, but is f64");
        }
    }
    let layer = MultiHeadAttentionConfig::new(WIDTH, 2).init(&device);
    let text = "q must be f32, f16 or bf16, but is f64";
    refused_as(layer.try_forward(MhaInput::self_attn(wide)), text);
}

#[test]
fn a_linear_layer_of_another_type_refuses_f64() {
    let layer = LinearConfig::new(WIDTH, 4).init(&Device::flex());
    let wide = x(WIDTH).cast(DType::F64);
    let product = try_linear(&layer, wide.clone());
    refused_as(product, "x must be f32, but is f64");
    let layer = cast(layer, DType::F64);
    let product = try_linear(&layer, x(WIDTH));
    refused_as(product, "x must be f64, but is f32");
    refused(try_linear(&layer, x(8).cast(DType::F64)), "Shape");
    // Burn multiplies two of one type.
    assert_eq!(try_linear(&layer, wide).unwrap().dims(), [2, 3, 4]);
}

#[test]
fn tokens_of_another_type_than_the_norms_are_to_blame() {
    let device = Device::flex();
    let half = x(WIDTH).cast(DType::F16);
    let layer = DynamicMaskAttentionConfig::new(WIDTH, 2).init(&device);
    let masked = MaskedAttentionLayerConfig::new(WIDTH, 2).init(&device);
    let cross = DynamicMaskCrossAttentionConfig::new(WIDTH, 2).init(&device);
    // Parameters of f32 are read as they are or rounded for the products, and the cache has their type.
    assert_eq!(layer.forward(half.clone()).dtype(), DType::F16);
    assert_eq!(masked.forward(half.clone()).dtype(), DType::F16);
    let context = half.clone();
    assert_eq!(cross.forward(half.clone(), context).dtype(), DType::F16);
    refused_as(
        layer.try_forward_cached(half.clone(), &mut layer.init_cache(2)),
        "k must be f32, but is f16",
    );
    refused_as(
        cross.try_forward(half.clone(), x(WIDTH)),
        "k must be f16, but is f32",
    );
    let layer = cast(layer, DType::BF16);
    let (masked, cross) = (cast(masked, DType::BF16), cast(cross, DType::BF16));
    let mut cache = layer.init_cache(2);
    for result in [
        layer.try_forward(half.clone()).map(drop),
        (layer.try_forward_cached(half.clone(), &mut cache)).map(drop),
        masked.try_forward(half.clone()).map(drop),
        cross.try_forward(half.clone(), x(WIDTH)).map(drop),
        cross.try_keys(half.clone()).map(drop),
    ] {
        refused_as(result, "x must be bf16, but is f16");
    }
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
        let rotary = Some(Rope::new(len).with_base(theta));
        let own = DynamicMaskAttentionConfig::new(WIDTH, 2).with_rope(rotary.clone());
        refused_as(own.try_init(&device), &text(len, theta));
        let masked = MaskedAttentionLayerConfig::new(WIDTH, 2).with_rope(rotary);
        refused_as(masked.try_init(&device), &text(len, theta));
    }
    let endless = DynamicMaskAttentionConfig::new(WIDTH, 2).with_rope(Some(Rope::new(usize::MAX)));
    refused(endless.try_init(&device), "TooLarge");
}

#[test]
fn a_rate_of_dropout_that_is_none_is_refused() {
    for rate in [-0.1, 1.0, f64::NAN, f64::INFINITY] {
        let config = MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(rate);
        refused(config.try_init(&Device::flex()), "DropoutRate");
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
        let parts = Selection::new().with_recent(Some(recent)).with_sinks(sinks);
        let config = config.clone().with_selection(parts.clone());
        refused_as(config.try_init(&Device::flex()), &text(recent, sinks));
        // A window widened to all keys in training keeps its parts for when it shrinks again.
        let mut layer = (config.with_selection(parts.with_window(Some(4)))).init(&Device::flex());
        assert!(layer.try_set_keep_window(None).is_ok());
    }
    let none = config.with_selection(Selection::new().with_recent(Some(0)));
    assert!(none.try_init(&Device::flex()).is_ok());
}

#[test]
fn no_error_prints_a_number_that_stands_for_all() {
    let device = Device::flex();
    let rows = |len| Tensor::<4>::zeros([1, 2, len, 8], &device);
    let scores = Tensor::<3>::zeros([1, 2, 3], &device);
    let attention = Attention::new(rows(3), rows(3), rows(3))
        .intervals(&select(scores, usize::MAX))
        .options(AttentionOptions::new().with_keep_window(2));
    let text = "the options keep 2 keys, but the intervals were selected for all";
    refused_as(attention.try_forward(), text);
    let error = AttentionError::TooLarge {
        what: "the size of q in bytes",
        size: usize::MAX,
        limit: 7,
    };
    let text = "the size of q in bytes is more than can be counted, past the limit of 7";
    assert_eq!(error.to_string(), text);
}

#[test]
fn layers_whose_weights_cannot_be_addressed_are_refused() {
    let device = Device::flex();
    let refused = |error: AttentionError| {
        let text = error.to_string();
        let of_weights = text.starts_with("the size of a weight in bytes is");
        assert!(of_weights, "{text}");
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
    refused(try_split_heads(x, [usize::MAX, 1]), "Shape");
}

#[test]
fn a_step_of_multi_head_attention_in_another_type_is_refused_and_leaves_the_cache() {
    let layer = MultiHeadAttentionConfig::new(WIDTH, 2).init(&Device::flex());
    let mut cache = MhaCache::autoregressive();
    let first = MhaInput::self_attn(x(WIDTH));
    let _ = layer.forward_cache(first, &mut cache);
    let more = Tensor::<3>::ones([2, 4, WIDTH], &Device::flex());
    let half = more.clone().cast(DType::F16);
    let input = MhaInput::new(more.clone(), more.clone(), half.clone());
    let step = layer.try_forward_cache(input, &mut cache);
    refused_as(step, "v must be f32, but is f16");
    let step = layer.try_forward_cache(MhaInput::self_attn(half), &mut cache);
    refused_as(step, "q must be f32, but is f16");
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
    refused(slots.try_init(&device), "TooLarge");

    // A pool whose growth overflows.
    let mut cache = pages(1).with_grow_by(usize::MAX).init(&device);
    let kv = || Tensor::<4>::ones([1, 2, 20, 8], &device);
    refused(cache.try_append(kv(), kv(), None), "TooLarge");
    assert_eq!(cache.lengths(), [0]);

    // A record whose configuration is damaged.
    let cache = DynamicMaskCacheConfig::new(1, 2, 8, options).init(&device);
    let mut saved = serde_json::to_value(cache.to_record_sync()).unwrap();
    saved["config"]["batch"] = (1u64 << 40).into();
    let record: DynamicMaskCacheRecord = serde_json::from_value(saved).unwrap();
    let read = DynamicMaskCache::try_from_record(record, &device);
    refused(read, "Record");
}

#[test]
fn tokens_on_a_device_with_autodiff_are_overwritten() {
    let device = Device::flex().autodiff();
    let tokens = Tensor::<1, Int>::zeros([3], (&device, DType::I32));
    let tokens = try_overwrite(tokens, &[4, 5, 6]).unwrap();
    assert_eq!(tokens.device(), device);
    assert_eq!(ints(tokens), [4, 5, 6]);
}

#[test]
fn a_selection_with_a_softmax_of_ranks_serves_a_pass_behind_a_backward_pass() {
    let device = Device::flex().autodiff();
    let layer = DynamicMaskAttentionConfig::new(WIDTH, 2)
        .with_selection(Selection::keep(4))
        .with_learning(Some(ScoreLearning::new().with_runners_up(Some(2))))
        .init(&device);
    let x = uniform([1, 12, WIDTH], &device);
    let learned = |out: Tensor<3>| of_scores(&layer, &out.powi_scalar(2).sum().backward());
    let (out, intervals) = layer.forward_and_intervals(x.clone());
    let first = learned(out);
    let again = layer.forward_with_intervals(x, &intervals);
    assert_eq!(learned(again), first);
}
