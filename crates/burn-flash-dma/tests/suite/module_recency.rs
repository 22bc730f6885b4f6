//! Ranks that rise with the position: which keys they keep, that scores learn beside them, and what is refused.

use crate::case::values;
use crate::layer::of_linear_scores;
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput};
use burn_flash_dma::{AttentionError, Documents, ScoreRole};

const LEN: usize = 33;

fn config(slope: f64) -> DynamicMaskAttentionConfig {
    DynamicMaskAttentionConfig::new(32, 4)
        .with_n_kv_heads(Some(2))
        .with_keep_window(Some(5))
        .with_recency_slope(Some(slope))
}

fn x(device: &Device) -> Tensor<3> {
    Tensor::random([2, LEN, 32], Distribution::Normal(0.0, 1.0), device)
}

/// The same layer with another slope.
fn with_slope(layer: &DynamicMaskAttention, slope: f64) -> DynamicMaskAttention {
    let device = layer.q_proj.weight.device();
    config(slope)
        .init(&device)
        .load_record(layer.clone().into_record())
}

#[test]
fn a_score_gains_the_slope_per_position() {
    let device = Device::flex();
    let plain = config(0.0).init(&device);
    let x = x(&device);
    let scores = values(plain.scores(x.clone()));
    let sloped = values(with_slope(&plain, 0.25).scores(x.clone()));
    for (place, (score, sloped)) in scores.iter().zip(sloped).enumerate() {
        let expected = score + 0.25 * (place % LEN) as f64;
        assert!(
            (sloped - expected).abs() < 1e-5,
            "{place}: {sloped} is not {expected}"
        );
    }
}

#[test]
fn a_steep_slope_keeps_the_last_keys_and_documents_begin_where_they_began() {
    let device = Device::flex();
    let plain = config(0.0).init(&device);
    let sliding = config(0.0).with_recent(Some(5)).init(&device);
    let sliding = sliding.load_record(plain.clone().into_record());
    let steep = with_slope(&plain, 100.0);
    let x = x(&device);
    let [plain, steep, sliding] = [plain, steep, sliding].map(|layer| {
        let documents = Documents::from_lengths([vec![7, 13, LEN - 20], vec![LEN]]);
        let packed = DynamicMaskInput::new(x.clone()).documents(documents);
        [
            values(layer.forward(x.clone())),
            values(layer.forward(packed)),
        ]
    });
    assert_eq!(steep, sliding);
    assert_ne!(steep, plain);
}

#[test]
fn scores_learn_beside_it() {
    let device = Device::flex().autodiff();
    let layer = config(0.1).init(&device);
    let grads = layer.forward(x(&device)).powi_scalar(2).sum().backward();
    let of_scores = of_linear_scores(&layer, &grads);
    assert!(of_scores.iter().any(|x| *x != 0.0));
}

#[test]
fn what_it_does_not_fit_is_refused() {
    let device = Device::flex();
    for config in [
        config(-1.0),
        config(f64::NAN),
        config(f64::INFINITY),
        config(1e300),
        config(1.0).with_causal(false),
        config(1.0).with_score_role(Some(ScoreRole::RankAndBias)),
    ] {
        let error = config.try_init(&device).expect_err("it is refused");
        assert!(
            matches!(error, AttentionError::RecencySlope { .. }),
            "{error}"
        );
    }
    for config in [
        config(0.0).with_causal(false),
        config(0.0).with_score_role(Some(ScoreRole::RankAndBias)),
        config(1.0).with_keep_window(None),
    ] {
        assert!(config.try_init(&device).is_ok());
    }
}
