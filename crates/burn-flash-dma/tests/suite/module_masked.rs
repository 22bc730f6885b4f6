//! The layer of masked attention against the dynamic-mask layer with the same parameters and given scores.

use crate::case::{coin, grad, random, refused, size, tracked, values, within};
use crate::layer::{SPREAD, WIDTH};
use burn::module::{Lora, Module};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput, Logits,
    MaskedAttentionLayer, MaskedAttentionLayerConfig, MaskedInput, QkNorm, Rope, Scores,
};
use burn_flash_dma::{AttentionError, AttentionMask, KeyRanges, TilePlan};

const LEN: usize = 21;

fn config() -> MaskedAttentionLayerConfig {
    MaskedAttentionLayerConfig::new(WIDTH, 4)
        .with_n_kv_heads(Some(2))
        .with_initializer(SPREAD)
}

/// The layer, and a dynamic-mask layer with its parameters.
fn pair(
    config: &MaskedAttentionLayerConfig,
    device: &Device,
) -> (MaskedAttentionLayer, DynamicMaskAttention) {
    let mut layer = config.init(device);
    let dynamic = DynamicMaskAttentionConfig::new(WIDTH, 4)
        .with_n_kv_heads(Some(2))
        .with_logits(
            Logits::new()
                .with_causal(config.causal)
                .with_scale(config.scale)
                .with_softcap(config.softcap),
        )
        .with_rope(config.rope.clone())
        .with_qk_norm(config.qk_norm)
        .with_bias(config.bias)
        .with_initializer(SPREAD)
        .with_scores(Scores::Added)
        .init(device);
    layer.q_proj = dynamic.q_proj.clone();
    layer.k_proj = dynamic.k_proj.clone();
    layer.v_proj = dynamic.v_proj.clone();
    layer.o_proj = dynamic.o_proj.clone();
    (layer, dynamic)
}

fn configs() -> Vec<MaskedAttentionLayerConfig> {
    vec![
        config(),
        config()
            .with_rope(Some(Rope::new(64)))
            .with_softcap(Some(4.0)),
        config().with_causal(false).with_bias(true),
        config().with_qk_norm(QkNorm::None).with_scale(Some(0.6)),
    ]
}

fn x(device: &Device) -> Tensor<3> {
    tracked([2, LEN, WIDTH], device)
}

fn close(actual: &[f64], expected: &[f64], what: &str) {
    within(actual, expected, 5e-6 * size(expected).max(1.0), what);
}

/// The output, and the gradients of the tokens, of the bias and of two projections.
fn passes(
    out: Tensor<3>,
    x: &Tensor<3>,
    bias: &Tensor<3>,
    layer: &MaskedAttentionLayer,
) -> Vec<Vec<f64>> {
    let grads = out.clone().square().sum().backward();
    vec![
        values(out),
        grad(x, &grads),
        grad(bias, &grads),
        grad(&layer.q_proj.weight.val(), &grads),
        grad(&layer.o_proj.weight.val(), &grads),
    ]
}

#[test]
fn masks_and_biases_mean_what_they_mean_to_the_dynamic_layer() {
    let device = Device::flex().autodiff();
    for (at, config) in configs().iter().enumerate() {
        let (layer, dynamic) = pair(config, &device);
        for shape in [[2, 2, LEN, LEN], [1, 1, 1, LEN]] {
            let what = format!("layer {at}, mask {shape:?}");
            let (x, mask) = (x(&device), AttentionMask::visible(coin(shape, &device)));
            let bias = random([2, 2, LEN], &device).require_grad();
            let input = MaskedInput::new(x.clone()).mask(mask.clone());
            let out = layer.forward(input.bias(bias.clone().unsqueeze_dim(2)));
            let input = DynamicMaskInput::new(x.clone()).mask(mask);
            let expected = dynamic.forward_with_scores(input, bias.clone());
            let actual = passes(out, &x, &bias, &layer);
            let expected = passes(expected, &x, &bias, &layer);
            for (part, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                close(actual, expected, &format!("{what}, part {part}"));
            }
        }
        // Without mask and bias.
        let x = x(&device);
        let zeros = Tensor::zeros([2, 2, LEN], &device);
        let expected = dynamic.forward_with_scores(x.clone(), zeros);
        close(&values(layer.forward(x)), &values(expected), "no mask");
    }
}

#[test]
fn a_plan_is_its_mask() {
    let device = Device::flex();
    for causal in [true, false] {
        let layer = config().with_causal(causal).init(&device);
        let ranges = KeyRanges::sliding_window([LEN, LEN], 6, &device);
        let plan = TilePlan::from_ranges(ranges, [LEN, LEN], causal);
        let mask = AttentionMask::sliding_window([LEN, LEN], 6, &device);
        let x = x(&device);
        let [plan, mask] = [
            MaskedInput::new(x.clone()).plan(&plan),
            // The last one given counts.
            MaskedInput::new(x.clone()).plan(&plan).mask(mask),
        ]
        .map(|input| values(layer.forward(input)));
        assert_eq!(plan, mask);
        assert_ne!(plan, values(layer.forward(x)));
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = Device::flex();
    let init = |config: MaskedAttentionLayerConfig| config.try_init(&device);
    let (q_heads, kv_heads) = (4, 3);
    let error = init(config().with_n_kv_heads(Some(3))).unwrap_err();
    assert_eq!(error, AttentionError::HeadRatio { q_heads, kv_heads });
    refused(
        init(config().with_qk_norm(QkNorm::Rms(f64::NAN))),
        "Epsilon",
    );

    let layer = config().with_rope(Some(Rope::new(LEN))).init(&device);
    let x = x(&device);
    refused(layer.try_forward(x.clone().repeat_dim(1, 2)), "TooLarge");
    refused(layer.try_forward(x.clone().narrow(2, 0, 24)), "Shape");
    let ranges = KeyRanges::sliding_window([LEN, LEN], 6, &device);
    let plan = TilePlan::from_ranges(ranges, [LEN, LEN], false);
    let planned = MaskedInput::new(x.clone()).plan(&plan);
    refused(layer.try_forward(planned), "PlanCausal");
    let mask = AttentionMask::visible(coin([2, 3, LEN, LEN], &device));
    let masked = MaskedInput::new(x).mask(mask);
    refused(layer.try_forward(masked), "Broadcast");
}

#[test]
fn adapters_reach_every_projection() {
    let layer = config()
        .init(&Device::flex().autodiff())
        .apply_lora(Lora::new(2, 4.0));
    for projection in [&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj] {
        assert!(projection.weight.adapter().is_some());
    }
}
