//! Recency, ranks that rise with the position in every other head: the kept keys, the slope set by the window in
//! force, learning, and the cases without it.

use crate::case::{values, within};
use crate::layer::{self, Groups, gradients_with_scores, like, tokens_for};
use burn::tensor::Device;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Scores};

const LEN: usize = 33;
const WINDOW: usize = 8;

fn config(recency: bool) -> DynamicMaskAttentionConfig {
    layer::config()
        .with_n_kv_heads(Some(4))
        .selection(|s| s.with_window(Some(WINDOW)).with_recency(recency))
}

/// Gain of a layer's scores over those without recency, `[batch, heads, len]` as a flat list.
fn gained(config: DynamicMaskAttentionConfig) -> Vec<f64> {
    let with = config.init(&Device::flex());
    let without = like(&with, &config.selection(|s| s.with_recency(false)));
    let x = tokens_for(&with, 2, LEN);
    values(with.scores(x.clone()) - without.scores(x))
}

#[test]
fn every_other_head_gains_one_per_window_of_positions() {
    let gained = gained(config(true));
    let expected = (0..2 * 4 * LEN).map(|place| {
        let (head, position) = (place / LEN % 4, place % LEN);
        if head % 2 == 0 {
            position as f64 / WINDOW as f64
        } else {
            0.0
        }
    });
    within(&gained, &expected.collect::<Vec<_>>(), 1e-5, "scores");
}

#[test]
fn the_window_in_force_decides() {
    let mut layer = config(true).init(&Device::flex());
    let x = tokens_for(&layer, 1, LEN);
    let last = |layer: &DynamicMaskAttention| values(layer.scores(x.clone()))[LEN - 1];
    let before = last(&layer);
    layer
        .try_set_keep_window(Some(2 * WINDOW))
        .expect("it fits");
    let position = (LEN - 1) as f64;
    let lost = position / WINDOW as f64 - position / (2 * WINDOW) as f64;
    within(&[last(&layer)], &[before - lost], 1e-5, "a wider window");
}

#[test]
fn scores_learn_beside_it() {
    let layer = config(true).init(&Device::flex().autodiff());
    gradients_with_scores(&layer, LEN);
}

#[test]
fn nothing_rises_where_nothing_is_ranked_by_it() {
    let all = |config: DynamicMaskAttentionConfig| config.selection(|s| s.with_window(None));
    let sliding = |s: burn_flash_dma::nn::Selection| s.with_recent(Some(WINDOW));
    for config in [
        config(true).with_n_kv_heads(Some(1)),
        config(true).logits(|l| l.with_causal(false)),
        config(true).with_scores(Scores::Added),
        config(true).with_scores(Scores::Dma),
        config(true).selection(sliding),
        all(config(true)),
    ] {
        let gained = gained(config);
        assert!(gained.iter().all(|&gained| gained == 0.0));
    }
}
