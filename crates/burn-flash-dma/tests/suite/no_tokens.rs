//! Calls without tokens, keys or sequences: empty results with gradients, never a panic.

use crate::case::values;
use crate::layer::cast;
use burn::nn::LinearConfig;
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use burn_flash_dma::cache::PagedCacheConfig;
use burn_flash_dma::nn::mha::{MhaCache, MhaInput, MultiHeadAttentionConfig};
use burn_flash_dma::nn::{
    DynamicMaskAttentionConfig, DynamicMaskCrossAttentionConfig, DynamicMaskInput,
    MaskedAttentionLayerConfig, Scores, Selection,
};
use burn_flash_dma::train::{cross_entropy, token_losses};
use burn_flash_dma::{
    AttentionMask, AttentionOptions, BlockRule, KeyRanges, Selector, TilePlan,
    dynamic_mask_attention, linear, product, sliding_window, zoh_scores,
};

const WIDTH: usize = 16;

fn devices() -> [Device; 2] {
    [Device::flex(), Device::flex().autodiff()]
}

fn tokens(batch: usize, len: usize, device: &Device) -> Tensor<3> {
    Tensor::zeros([batch, len, WIDTH], device).set_require_grad(device.is_autodiff())
}

#[test]
fn layers_whose_scores_depend_on_positions_take_no_tokens() {
    let of = |selection| DynamicMaskAttentionConfig::new(WIDTH, 2).with_selection(selection);
    let turns = of(Selection::keep(4).with_turns(Some(2)));
    for device in devices() {
        for config in [&of(Selection::keep(4)), &turns] {
            let layer = config.init(&device);
            for [batch, len] in [[2, 0], [0, 3], [0, 0]] {
                let x = tokens(batch, len, &device);
                assert_eq!(layer.forward(x.clone()).dims(), [batch, len, WIDTH]);
                assert_eq!(layer.scores(x.clone()).dims(), [batch, 2, len]);
                assert_eq!(layer.selection(x).tensor().dims(), [batch, 2, len, 2]);
            }
        }
    }
}

#[test]
fn ranks_of_no_keys_compete_for_nothing() {
    let selector = Selector::top(2).runners_up(1).compete(true);
    for shape in [[1, 2, 0], [0, 2, 3], [1, 0, 3]] {
        let scores = Tensor::<3>::zeros(shape, &Device::flex().autodiff()).require_grad();
        let intervals = selector.select(scores);
        assert_eq!(intervals.tensor().dims()[..3], shape);
        assert!(intervals.runner_up_ends().is_some());
    }
}

#[test]
fn multi_head_attention_takes_no_queries_keys_or_sequences() {
    for device in devices() {
        for quiet in [false, true] {
            let layer = MultiHeadAttentionConfig::new(WIDTH, 2)
                .with_quiet_softmax(quiet)
                .init(&device);
            for [batch, q_len, k_len] in [[2, 0, 3], [2, 3, 0], [0, 3, 3], [0, 0, 0]] {
                let [q, k] = [q_len, k_len].map(|len| tokens(batch, len, &device));
                let input = MhaInput::new(q, k.clone(), k);
                let pad = Tensor::<2, Bool>::empty([batch, k_len], &device);
                let pad = input.clone().mask_pad(pad);
                let attn = Tensor::<3, Bool>::empty([batch, q_len, k_len], &device);
                for input in [
                    input.clone(),
                    input.clone().causal(),
                    pad.clone(),
                    pad.causal(),
                    input.mask_attn(attn),
                ] {
                    let output = layer.forward(input.clone());
                    assert_eq!(output.context.dims(), [batch, q_len, WIDTH]);
                    assert_eq!(output.weights().dims(), [batch, 2, q_len, k_len]);
                    let mut cache = MhaCache::autoregressive_cross_attention();
                    let output = layer.forward_cache(input, &mut cache);
                    assert_eq!(output.context.dims(), [batch, q_len, WIDTH]);
                }
            }
        }
    }
}

#[test]
fn masks_and_ranges_are_made_of_any_size() {
    let device = Device::flex();
    for lengths @ [q_len, k_len] in [[0, 0], [0, 3], [3, 0], [2, 3]] {
        let shape = [1, 1, q_len, k_len];
        assert_eq!(AttentionMask::causal(lengths, &device).dims(), shape);
        for window in [0, 2, usize::MAX] {
            let mask = AttentionMask::sliding_window(lengths, window, &device);
            assert_eq!(mask.dims(), shape);
            let ranges = KeyRanges::sliding_window(lengths, window, &device);
            let plan = TilePlan::from_ranges(ranges, lengths, true);
            assert_eq!(plan.geometry().mask, shape);
        }
        for batch in [0, 2] {
            let bias = Tensor::<4>::zeros([batch, 2, q_len, k_len], &device);
            let shape = bias.dims();
            for window in [1, 2, usize::MAX] {
                let causal = AttentionMask::causal(lengths, &device);
                for among in [None, Some(causal)] {
                    let top = AttentionMask::top(bias.clone(), window, q_len, among);
                    assert_eq!(top.dims(), shape);
                    let blocks = top.clone().in_key_blocks(usize::MAX, BlockRule::Majority);
                    assert_eq!(blocks.dims(), shape);
                    let causal = AttentionMask::causal(lengths, &device);
                    assert_eq!(top.clone().and(causal.clone()).dims(), shape);
                    assert_eq!(causal.or(top).dims(), shape);
                }
            }
        }
    }
    for [batch, len] in [[0, 0], [0, 3], [2, 0], [2, 3]] {
        let ids = Tensor::<2, Int>::zeros([batch, len], &device);
        let mask = AttentionMask::documents(ids.clone());
        assert_eq!(mask.dims(), [batch, 1, len, len]);
        let ranges = KeyRanges::documents(ids);
        let ranges = ranges.and(KeyRanges::sliding_window([len, len], 2, &device));
        let plan = TilePlan::from_ranges(ranges, [len, len], true);
        assert_eq!(plan.geometry().mask, [batch, 1, len, len]);
        let lengths = Tensor::<1, Int>::zeros([batch], &device);
        let mask = AttentionMask::padding(lengths.clone(), len);
        assert_eq!(mask.dims(), [batch, 1, 1, len]);
        let plan = TilePlan::from_ranges(KeyRanges::padding(lengths), [len, len], false);
        assert_eq!(plan.geometry().mask, [batch, 1, 1, len]);
    }
}

#[test]
fn the_output_of_no_tokens_has_gradients() {
    let device = Device::flex().autodiff();
    for [batch, len] in [[0, 3], [2, 0]] {
        let x = || tokens(batch, len, &device);
        let check = |forward: &dyn Fn(Tensor<3>) -> Tensor<3>, what: &str| {
            let input = x();
            let output = forward(input.clone());
            assert!(output.is_tracked(), "{what}");
            let grads = output.sum().backward();
            let grad = input.grad(&grads).expect("the input has a gradient");
            assert_eq!(grad.dims(), [batch, len, WIDTH], "{what}");
        };
        for scores in [Scores::Ranking, Scores::Dma, Scores::Added] {
            let config = DynamicMaskAttentionConfig::new(WIDTH, 2).with_scores(scores);
            for selection in [Selection::new(), Selection::keep(2)] {
                let layer = config.clone().with_selection(selection).init(&device);
                check(&|x| layer.forward(x), "dynamic mask");
            }
        }
        let layer = MaskedAttentionLayerConfig::new(WIDTH, 2).init(&device);
        check(&|x| layer.forward(x), "masked");
        let layer = DynamicMaskCrossAttentionConfig::new(WIDTH, 2).init(&device);
        check(&|input| layer.forward(input, x()), "cross");
        let layer = MultiHeadAttentionConfig::new(WIDTH, 2).init(&device);
        let heads = |x| layer.forward(MhaInput::self_attn(x)).context;
        check(&heads, "multi-head");
        check(&|x| linear(&layer.query, x), "linear");
    }
}

#[test]
fn a_product_over_no_features_is_zero_and_has_gradients() {
    let device = Device::flex().autodiff();
    let x = Tensor::<2>::zeros([3, 0], &device).require_grad();
    let weight = Tensor::<2>::zeros([0, 5], &device).require_grad();
    let out = product(x.clone(), weight.clone());
    assert_eq!(out.dims(), [3, 5]);
    assert_eq!(values(out.clone()), [0.0; 15]);
    let grads = out.sum().backward();
    assert_eq!(x.grad(&grads).map(|grad| grad.dims()), Some([3, 0]));
    assert_eq!(weight.grad(&grads).map(|grad| grad.dims()), Some([0, 5]));
}

#[test]
fn the_loss_of_no_tokens_is_zero_and_has_gradients() {
    let device = Device::flex().autodiff();
    let logits = Tensor::<2>::zeros([0, 7], &device).require_grad();
    let targets = Tensor::<1, Int>::zeros([0], &device);
    let losses = token_losses(logits.clone(), targets.clone());
    assert_eq!(losses.dims(), [0]);
    let loss = cross_entropy(logits.clone(), targets);
    let grads = loss.backward();
    assert_eq!(logits.grad(&grads).map(|grad| grad.dims()), Some([0, 7]));
    assert_eq!(loss.into_scalar::<f32>(), 0.0);
}

#[test]
fn a_linear_layer_in_f64_takes_no_tokens() {
    let device = Device::flex();
    let layer = cast(LinearConfig::new(2, 3).init(&device), DType::F64);
    let x = Tensor::<3>::zeros([0, 2, 2], (&device, DType::F64));
    assert_eq!(linear(&layer, x).dims(), [0, 2, 3]);
}

#[test]
fn attention_with_scores_takes_no_keys() {
    for device in devices() {
        let rows = |len| Tensor::<4>::ones([1, 2, len, 8], &device);
        let scores = Tensor::<3>::zeros([1, 2, 0], &device);
        let options = AttentionOptions::new();
        let out = dynamic_mask_attention(rows(3), rows(0), rows(0), scores, options);
        assert_eq!(values(out), [0.0; 2 * 3 * 8]);
    }
}

#[test]
fn scores_of_no_heads_or_features_are_made() {
    let device = Device::flex();
    for [heads, dim] in [[0, 8], [2, 0]] {
        let v = Tensor::<4>::zeros([1, heads, 3, dim], &device);
        let dt_proj = Tensor::<2>::zeros([heads, heads * dim], &device);
        let scores = zoh_scores(v, dt_proj, Tensor::zeros([heads], &device));
        assert_eq!(values(scores), vec![1.0; 3 * heads]);
    }
}

#[test]
fn a_cache_of_pages_without_sequences_takes_a_long_step() {
    let device = Device::flex();
    let mut cache = PagedCacheConfig::new(0, 2, 8, 64).init(&device);
    let rows = |heads| Tensor::<4>::zeros([0, heads, 20, 8], &device);
    let out = cache.step(rows(4), rows(2), rows(2), None);
    assert_eq!(out.dims(), [0, 4, 20, 8]);
    assert_eq!(cache.sequences(), 0);
}

#[test]
fn a_context_of_no_features_may_have_padding() {
    let device = Device::flex();
    let layer = DynamicMaskCrossAttentionConfig::new(WIDTH, 2)
        .with_d_context(Some(0))
        .init(&device);
    let context = DynamicMaskInput::new(Tensor::zeros([1, 5, 0], &device)).lengths([3]);
    let out = layer.forward(tokens(1, 2, &device), context);
    assert_eq!(out.dims(), [1, 2, WIDTH]);
}

#[test]
fn lengths_of_padding_are_of_any_integer_type() {
    for dtype in [DType::I32, DType::I64] {
        let lengths = Tensor::<1, Int>::from_data([1, 3], (&Device::flex(), dtype));
        let shown = AttentionMask::padding(lengths, 3).into_visible();
        let shown: Vec<bool> = shown.into_data().iter().collect();
        assert_eq!(shown, [true, false, false, true, true, true]);
    }
}

#[test]
fn a_window_of_all_positions_has_a_rate_of_ties() {
    let shape = [1, 1, 4];
    let intervals = sliding_window(shape, usize::MAX - 1, &Device::flex());
    let scores = Tensor::<3>::zeros(shape, &Device::flex());
    assert_eq!(intervals.tie_rate(&scores), 0.0);
}

#[test]
fn a_layer_of_tokens_without_features_has_biases() {
    for device in devices() {
        let layer = MaskedAttentionLayerConfig::new(0, 1)
            .with_head_dim(Some(8))
            .with_bias(true)
            .init(&device);
        let x = Tensor::<3>::zeros([1, 5, 0], &device);
        assert_eq!(layer.forward(x).dims(), [1, 5, 0]);
    }
}
