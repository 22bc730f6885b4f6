//! Calls without tokens, keys or sequences: empty results with gradients, never a panic.

use burn::tensor::{Bool, Device, Int, Tensor};
use burn_flash_dma::nn::mha::{MhaCache, MhaInput, MultiHeadAttentionConfig};
use burn_flash_dma::nn::{
    DynamicMaskAttentionConfig, DynamicMaskCrossAttentionConfig, MaskedAttentionLayerConfig,
    RoundRobin, ScoreForm,
};
use burn_flash_dma::train::{cross_entropy, token_losses};
use burn_flash_dma::{
    AttentionMask, BlockRule, KeyRanges, RankSoftmax, Selector, TilePlan, linear, product,
};

const WIDTH: usize = 16;

/// Without autodiff, and with it.
fn devices() -> [Device; 2] {
    [Device::flex(), Device::flex().autodiff()]
}

fn tokens(batch: usize, len: usize, device: &Device) -> Tensor<3> {
    let x = Tensor::zeros([batch, len, WIDTH], device);
    match device.is_autodiff() {
        true => x.require_grad(),
        false => x,
    }
}

#[test]
fn layers_whose_scores_depend_on_positions_take_no_tokens() {
    let config = DynamicMaskAttentionConfig::new(WIDTH, 2).with_keep_window(Some(4));
    let turns = config
        .clone()
        .with_round_robin(Some(RoundRobin::new(2, 1.0)));
    let slope = config.with_recency_slope(Some(0.5));
    for device in devices() {
        for config in [&turns, &slope] {
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
    let selector = Selector::top(2)
        .runners_up(1)
        .rank_softmax(RankSoftmax::new(1.0).ok());
    for shape in [[1, 2, 0], [0, 2, 3], [1, 0, 3]] {
        let scores = Tensor::<3>::zeros(shape, &Device::flex().autodiff()).require_grad();
        let intervals = selector.select(scores);
        assert_eq!(intervals.tensor().dims()[..3], shape);
        assert!(intervals.far().is_some());
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
        let mut outputs = Vec::new();
        for form in [ScoreForm::Zoh, ScoreForm::Linear] {
            let config = DynamicMaskAttentionConfig::new(WIDTH, 2).with_score_form(form);
            for window in [None, Some(2)] {
                let input = x();
                let layer = config.clone().with_keep_window(window).init(&device);
                outputs.push((layer.forward(input.clone()), input));
            }
        }
        let input = x();
        let layer = MaskedAttentionLayerConfig::new(WIDTH, 2).init(&device);
        outputs.push((layer.forward(input.clone()), input));
        let input = x();
        let layer = DynamicMaskCrossAttentionConfig::new(WIDTH, 2).init(&device);
        outputs.push((layer.forward(input.clone(), x()), input));
        let input = x();
        let layer = MultiHeadAttentionConfig::new(WIDTH, 2).init(&device);
        let output = layer.forward(MhaInput::self_attn(input.clone()));
        outputs.push((output.context, input));
        let input = x();
        outputs.push((linear(&layer.query, input.clone()), input));
        for (index, (output, input)) in outputs.into_iter().enumerate() {
            assert!(output.is_tracked(), "output {index}");
            let grads = output.sum().backward();
            let grad = input.grad(&grads).expect("the input has a gradient");
            assert_eq!(grad.dims(), [batch, len, WIDTH], "output {index}");
        }
    }
}

#[test]
fn a_product_over_no_features_is_zero_and_has_gradients() {
    let device = Device::flex().autodiff();
    let x = Tensor::<2>::zeros([3, 0], &device).require_grad();
    let weight = Tensor::<2>::zeros([0, 5], &device).require_grad();
    let out = product(x.clone(), weight.clone());
    assert_eq!(out.dims(), [3, 5]);
    let numbers: Vec<f32> = out.clone().into_data().iter().collect();
    assert_eq!(numbers, [0.0; 15]);
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
