//! The learnable sink of the layer: its effect, learning and saving.

use crate::case::{values, within};
use crate::layer::{self, Groups, gradients_with_scores, tokens_for};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, QkNorm};
use burn_flash_dma::{AttentionOptions, Selector, learnable_sink};

fn config() -> DynamicMaskAttentionConfig {
    layer::config()
        .with_qk_norm(QkNorm::None)
        .logits(|l| l.with_sink(true))
}

fn with_logits(mut layer: DynamicMaskAttention, logits: [f32; 4]) -> DynamicMaskAttention {
    let device = layer.q_proj.weight.device();
    layer.sink_logits = Some(Param::from_tensor(Tensor::from_floats(logits, &device)));
    layer
}

#[test]
fn it_takes_weight_from_the_keys() {
    let device = Device::flex();
    let layer = config().init(&device);
    let x = tokens_for(&layer, 2, 21);
    let mut without = layer.clone();
    without.sink_logits = None;
    let nearly_none = with_logits(layer.clone(), [-200.0; 4]);
    let [nearly, none] = [nearly_none, without].map(|layer| values(layer.forward(x.clone())));
    assert_eq!(nearly, none);
    let all = with_logits(layer.clone(), [200.0; 4]).forward(x.clone());
    assert_eq!(values(all), vec![0.0; 2 * 21 * 32]);

    // By hand, from the parts.
    let logits = [2.0, -1.0, 0.5, 0.0];
    let layer = with_logits(layer, logits);
    let heads = |projection: &burn::nn::Linear, heads: usize| {
        let rows = projection.forward(x.clone()).reshape([2, 21, heads, 8]);
        rows.swap_dims(1, 2)
    };
    let (q, k) = (heads(&layer.q_proj, 4), heads(&layer.k_proj, 2));
    let v = heads(&layer.v_proj, 2);
    let intervals = Selector::top(5).select(layer.scores(x.clone()));
    let options = AttentionOptions::new().with_keep_window(5);
    let attention = burn_flash_dma::Attention::new(q, k, v).options(options);
    let (out, lse) = attention.intervals(&intervals).forward_with_lse();
    let (out, _) = learnable_sink(out, lse, Tensor::from_floats(logits, &device));
    let rows = out.swap_dims(1, 2).reshape([2, 21, 32]);
    let expected = layer.o_proj.forward(rows);
    within(&values(layer.forward(x)), &values(expected), 2e-6, "out");
}

#[test]
fn it_learns_beside_scores_that_only_rank() {
    let layer = config().init(&Device::flex().autodiff());
    let grads = gradients_with_scores(&layer, 21);
    let logits = layer.sink_logits.as_ref().expect("it has a sink").val();
    let of_logits = values(logits.grad(&grads).expect("tracked"));
    assert!(of_logits.iter().all(|x| *x != 0.0), "{of_logits:?}");
}

#[test]
fn it_is_saved() {
    let device = Device::flex();
    let layer = with_logits(config().init(&device), [1.0, 2.0, 3.0, 4.0]);
    let record = layer.clone().into_record();
    let loaded = config().init(&device).load_record(record);
    let logits = loaded.sink_logits.expect("it has a sink").val();
    assert_eq!(values(logits), [1.0, 2.0, 3.0, 4.0]);
}
