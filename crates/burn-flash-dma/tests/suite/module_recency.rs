//! Ranks that rise with the position: which keys they keep, that scores learn beside them, and what is refused.

use crate::case::{refused, values, within};
use crate::layer::{self, Groups, gradients_with_scores, like, tokens_for};
use burn::tensor::Device;
use burn_flash_dma::Documents;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, DynamicMaskInput, Scores};

const LEN: usize = 33;

fn config(slope: f64) -> DynamicMaskAttentionConfig {
    layer::config().selection(|s| s.with_recency_slope(slope))
}

#[test]
fn a_score_gains_the_slope_per_position() {
    let plain = config(0.0).init(&Device::flex());
    let x = tokens_for(&plain, 2, LEN);
    let scores = values(plain.scores(x.clone()));
    let sloped = values(like(&plain, &config(0.25)).scores(x));
    let with_slope = |(place, score): (usize, f64)| score + 0.25 * (place % LEN) as f64;
    let expected: Vec<f64> = scores.into_iter().enumerate().map(with_slope).collect();
    within(&sloped, &expected, 1e-5, "scores");
}

#[test]
fn a_steep_slope_keeps_the_last_keys_and_documents_begin_where_they_began() {
    let plain = config(0.0).init(&Device::flex());
    let sliding = like(&plain, &config(0.0).selection(|s| s.with_recent(Some(5))));
    let steep = like(&plain, &config(100.0));
    let x = tokens_for(&plain, 2, LEN);
    let [plain, steep, sliding] = [plain, steep, sliding].map(|layer| {
        let documents = Documents::from_lengths([vec![7, 13, LEN - 20], vec![LEN]]);
        let packed = DynamicMaskInput::new(x.clone()).documents(documents);
        [layer.forward(x.clone()), layer.forward(packed)].map(values)
    });
    assert_eq!(steep, sliding);
    assert_ne!(steep, plain);
}

#[test]
fn scores_learn_beside_it() {
    let layer = config(0.1).init(&Device::flex().autodiff());
    gradients_with_scores(&layer, LEN);
}

#[test]
fn what_it_does_not_fit_is_refused() {
    let device = Device::flex();
    for config in [
        config(-1.0),
        config(f64::NAN),
        config(f64::INFINITY),
        config(1e300),
        config(1.0).logits(|l| l.with_causal(false)),
        config(1.0).with_scores(Scores::Added),
    ] {
        refused(config.try_init(&device), "RecencySlope");
    }
    for config in [
        config(0.0).logits(|l| l.with_causal(false)),
        config(0.0).with_scores(Scores::Added),
        config(1.0).selection(|s| s.with_window(None)),
    ] {
        assert!(config.try_init(&device).is_ok());
    }
}
