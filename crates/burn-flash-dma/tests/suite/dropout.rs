//! Dropout of the layer and of the operation through Burn, with seeds of their own.

use super::alone::alone;
use crate::case::{grad, near, refused, uniform, values, within};
use crate::layer::{self, Groups, parameters};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput, Scores,
};
use burn_flash_dma::train::{Checkpointed, Selections};
use burn_flash_dma::{AttentionMask, AttentionOptions, Dropout, dynamic_mask_attention};

fn seeded(seed: u64) -> Device {
    let device = Device::flex().autodiff();
    device.seed(seed);
    device
}

fn config(rate: f64) -> DynamicMaskAttentionConfig {
    layer::config()
        .selection(|s| s.with_window(Some(6)))
        .logits(|l| l.with_dropout(rate))
}

fn tokens(device: &Device) -> Tensor<3> {
    layer::tokens(2, 24, device)
}

#[test]
fn a_layer_drops_in_training_alone() {
    alone!();
    let device = seeded(1);
    let (layer, x) = (config(0.3).init(&device), tokens(&device));
    let first = values(layer.forward(x.clone()));
    let second = values(layer.forward(x.clone()));
    assert_ne!(first, second, "every call has its mask");

    let plain = x.clone().without_autodiff();
    let valid = layer.valid();
    let inference = values(valid.forward(plain.clone()));
    assert_ne!(inference, first);
    assert_eq!(inference, values(valid.forward(plain)));
    assert_eq!(inference, values(layer.clone().freeze().forward(x.clone())));
    assert_ne!(inference, values(valid.train().forward(x.clone())));
    // A cache has no dropout, even if its layer has.
    let layer = layer.valid();
    let mut cache = layer.init_cache(2);
    let cached = layer.forward_cached(x.without_autodiff(), &mut cache);
    within(&values(cached), &inference, 1e-6, "cached");
}

#[test]
fn the_expectation_over_calls_is_the_layer_without_dropout() {
    alone!();
    let device = seeded(2);
    let (layer, x) = (config(0.25).init(&device), tokens(&device));
    let exact = values(layer.valid().forward(x.clone().without_autodiff()));
    let calls = 400;
    let (mut sums, mut squares) = (vec![0.0; exact.len()], vec![0.0; exact.len()]);
    for _ in 0..calls {
        for (n, x) in values(layer.forward(x.clone())).into_iter().enumerate() {
            sums[n] += x;
            squares[n] += x * x;
        }
    }
    let len = f64::from(calls);
    for (n, exact) in exact.into_iter().enumerate() {
        let mean = sums[n] / len;
        let deviation = ((squares[n] / len - mean * mean).max(0.0) / len).sqrt();
        let near = (mean - exact).abs() < 5.5 * deviation + 1e-7;
        assert!(near, "{n}: {mean} and {exact}");
    }
}

#[test]
fn a_seed_before_the_layer_is_made_repeats_its_masks() {
    alone!();
    let device = seeded(3);
    let run = || {
        device.seed(7);
        let (layer, x) = (config(0.5).init(&device), tokens(&device));
        [(); 3].map(|()| values(layer.forward(x.clone())))
    };
    let first = run();
    assert_eq!(first, run());
    assert_ne!(first[0], first[1]);
    // A copy continues the original's seeds.
    let (layer, x) = (config(0.5).init(&device), tokens(&device));
    let copied = values(layer.clone().forward(x.clone()));
    assert_ne!(copied, values(layer.forward(x)));
}

#[test]
fn a_layer_without_dropout_is_one_of_rate_zero() {
    alone!();
    let device = seeded(4);
    let run = |config: DynamicMaskAttentionConfig| {
        device.seed(9);
        let layer = config.init(&device);
        values(layer.forward(tokens(&device)))
    };
    let plain = layer::config().selection(|s| s.with_window(Some(6)));
    assert_eq!(run(plain), run(config(0.0)));
}

#[test]
fn a_layer_drops_under_a_mask_of_pairs_too() {
    alone!();
    let device = seeded(5);
    // Under such a mask, scores that only rank cannot be trained.
    let config = config(0.3).with_scores(Scores::Added);
    let (layer, x) = (config.init(&device), tokens(&device));
    let mask = AttentionMask::sliding_window([24, 24], 9, &device);
    let run = || values(layer.forward(DynamicMaskInput::new(x.clone()).mask(mask.clone())));
    assert_ne!(run(), run());
}

#[test]
fn rates_that_are_no_probability_less_than_one_are_refused() {
    alone!();
    let device = seeded(6);
    for rate in [1.0, -0.5, f64::NAN, 1.0 - 1e-12] {
        refused(config(rate).try_init(&device), "DropoutRate");
    }
}

#[test]
fn calls_of_one_seed_are_equal_and_of_another_differ() {
    alone!();
    let device = seeded(7);
    let rows = [4, 2, 2].map(|heads| uniform([1, heads, 20, 16], &device));
    let scores = uniform([1, 2, 20], &device);
    let run = |dropout: Option<Dropout>| {
        let options = AttentionOptions::new().with_keep_window(5);
        let options = options.with_dropout(dropout);
        let rows = rows.clone().map(|row| row.detach().require_grad());
        let [q, k, v] = rows.clone();
        let out = dynamic_mask_attention(q, k, v, scores.clone(), options);
        let grads = out.clone().square().sum().backward();
        let grads = rows.map(|row| grad(&row, &grads));
        (values(out.without_autodiff()), grads)
    };
    let of = |rate, seed| Some(Dropout::new(rate, seed).unwrap());
    assert_eq!(run(of(0.4, 5)), run(of(0.4, 5)));
    assert_ne!(run(of(0.4, 5)).0, run(of(0.4, 6)).0);
    assert_ne!(run(of(0.4, 5)).0, run(of(0.4, 5 << 32)).0);
    assert_eq!(run(of(0.0, 5)), run(None));
}

/// A block of one layer and its residual.
fn block(layer: &DynamicMaskAttention, x: Tensor<3>, selections: &mut Selections) -> Tensor<3> {
    x.clone() + selections.attend(layer, x)
}

/// Initialises the parameters, which otherwise happens on first use, in an order that depends on the pass.
struct Make;

impl ModuleVisitor for Make {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        drop(param.val());
    }
}

#[test]
fn a_block_that_is_computed_twice_has_one_mask() {
    alone!();
    let device = seeded(8);
    let run = |checkpointed: bool| {
        device.seed(11);
        let blocks = [(); 2].map(|()| config(0.4).init(&device));
        blocks.visit(&mut Make);
        let x = tokens(&device);
        let (loss, gradients) = if checkpointed {
            let stack = Checkpointed::forward(&blocks, x, block);
            let loss = stack.output().powi_scalar(2).sum();
            let gradients = stack.backward(&loss, &blocks);
            (loss, gradients)
        } else {
            let out = (blocks.iter()).fold(x, |x, layer| block(layer, x, &mut Selections::new()));
            let loss = out.powi_scalar(2).sum();
            let gradients = GradientsParams::from_grads(loss.backward(), &blocks);
            (loss, gradients)
        };
        let all = parameters(&blocks, &gradients).into_iter();
        let all = all.flat_map(|parameter| parameter.gradient.unwrap_or_default());
        (values(loss.without_autodiff()), all.collect::<Vec<_>>())
    };
    let ((loss, plain), (again, checkpointed)) = (run(false), run(true));
    assert_eq!(loss, again);
    assert!(plain.iter().any(|&g| g != 0.0));
    near(&checkpointed, &plain, 1e-5, "gradients");
}
