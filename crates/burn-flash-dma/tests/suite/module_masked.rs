//! The layer of masked attention beside the dynamic-mask layer with the same parameters and given scores.

use crate::case::values;
use burn::module::{Initializer, Lora, Module};
use burn::tensor::{Bool, Device, Distribution, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput, MaskedAttentionLayer,
    MaskedAttentionLayerConfig, MaskedInput,
};
use burn_flash_dma::{AttentionError, AttentionMask, KeyRanges, ScoreRole, TilePlan};

const WIDTH: usize = 32;
const LEN: usize = 21;

fn config() -> MaskedAttentionLayerConfig {
    MaskedAttentionLayerConfig::new(WIDTH, 4)
        .with_n_kv_heads(Some(2))
        .with_initializer(initializer())
}

fn initializer() -> Initializer {
    Initializer::Normal {
        mean: 0.0,
        std: 0.3,
    }
}

/// The layer, and one of the other kind with its parameters.
fn pair(
    config: &MaskedAttentionLayerConfig,
    device: &Device,
) -> (MaskedAttentionLayer, DynamicMaskAttention) {
    let mut layer = config.init(device);
    let dynamic = DynamicMaskAttentionConfig::new(WIDTH, 4)
        .with_n_kv_heads(Some(2))
        .with_causal(config.causal)
        .with_max_seq_len(config.max_seq_len)
        .with_qk_norm(config.qk_norm)
        .with_bias(config.bias)
        .with_scale(config.scale)
        .with_softcap(config.softcap)
        .with_initializer(initializer())
        .with_score_role(Some(ScoreRole::RankAndBias))
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
        config().with_max_seq_len(Some(64)).with_softcap(Some(4.0)),
        config().with_causal(false).with_bias(true),
        config().with_qk_norm(false).with_scale(Some(0.6)),
    ]
}

fn x(device: &Device) -> Tensor<3> {
    let normal = Distribution::Normal(0.0, 1.0);
    let tensor = Tensor::random([2, LEN, WIDTH], normal, device);
    match device.is_autodiff() {
        true => tensor.require_grad(),
        false => tensor,
    }
}

fn coin(shape: [usize; 4], device: &Device) -> Tensor<4, Bool> {
    Tensor::<4>::random(shape, Distribution::Default, device).greater_elem(0.35)
}

fn close(actual: &[f64], expected: &[f64], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let size = expected.iter().fold(1.0f64, |most, x| most.max(x.abs()));
    for (at, (a, e)) in actual.iter().zip(expected).enumerate() {
        let error = (a - e).abs();
        assert!(error <= 5e-6 * size, "{what}, element {at}: {a} is not {e}");
    }
}

/// The output, and the gradients of the tokens, of the bias and of two projections.
fn passes(
    out: Tensor<3>,
    x: &Tensor<3>,
    bias: &Tensor<3>,
    layer: &MaskedAttentionLayer,
) -> Vec<Vec<f64>> {
    let grads = out.clone().square().sum().backward();
    let of = |weight: Tensor<2>| values(weight.grad(&grads).expect("tracked"));
    vec![
        values(out),
        values(x.grad(&grads).expect("tracked")),
        values(bias.grad(&grads).expect("tracked")),
        of(layer.q_proj.weight.val()),
        of(layer.o_proj.weight.val()),
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
            let normal = Distribution::Normal(0.0, 1.0);
            let bias = Tensor::<3>::random([2, 2, LEN], normal, &device).require_grad();
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
        // Without any mask and bias.
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
            // The one that was given last.
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
    let refused = |config: MaskedAttentionLayerConfig| config.try_init(&device).unwrap_err();
    let (q_heads, kv_heads) = (4, 3);
    let error = refused(config().with_n_kv_heads(Some(3)));
    assert_eq!(error, AttentionError::HeadRatio { q_heads, kv_heads });
    let error = refused(config().with_norm_epsilon(Some(f64::NAN)));
    assert!(matches!(error, AttentionError::Epsilon { .. }));

    let layer = config().with_max_seq_len(Some(LEN)).init(&device);
    let x = x(&device);
    let refused = |input: MaskedInput| layer.try_forward(input).unwrap_err();
    let error = refused(x.clone().repeat_dim(1, 2).into());
    assert!(matches!(error, AttentionError::TooLarge { .. }), "{error}");
    let error = refused(x.clone().narrow(2, 0, 24).into());
    assert!(matches!(error, AttentionError::Shape { .. }), "{error}");
    let ranges = KeyRanges::sliding_window([LEN, LEN], 6, &device);
    let plan = TilePlan::from_ranges(ranges, [LEN, LEN], false);
    let error = refused(MaskedInput::new(x.clone()).plan(&plan));
    assert!(
        matches!(error, AttentionError::PlanCausal { .. }),
        "{error}"
    );
    let mask = AttentionMask::visible(coin([2, 3, LEN, LEN], &device));
    let error = refused(MaskedInput::new(x).mask(mask));
    assert!(matches!(error, AttentionError::Broadcast { .. }), "{error}");
}

#[test]
fn adapters_reach_every_projection() {
    let device = Device::flex().autodiff();
    let layer = config().init(&device).apply_lora(Lora::new(2, 4.0));
    for projection in [&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.o_proj] {
        assert!(projection.weight.adapter().is_some());
    }
}
