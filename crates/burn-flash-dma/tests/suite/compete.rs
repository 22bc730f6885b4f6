//! Centred rank gradients, which sum to zero over the keys of a head.

use crate::case::{grad, ints, random, size, values, within};
use crate::layer::{self, like, of_scores, tokens_for};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, ScoreLearning};
use burn_flash_dma::{Attention, Documents, Selector};

const LEN: usize = 13;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;

/// Random q, k and v, and scores with the fourth of each head hidden.
fn inputs(len: usize) -> ([Tensor<4>; 3], Tensor<3>) {
    let device = &Device::flex().autodiff();
    device.seed(51);
    let rows = [HEADS, KV_HEADS, KV_HEADS].map(|heads| random([2, heads, len, DIM], device));
    let scores = random([2, KV_HEADS, len], device);
    let fourth = [0..2, 0..KV_HEADS, 3..4];
    (rows, scores.slice_fill(fourth, f32::NEG_INFINITY))
}

/// Gradient of the scores under a rule, and at how many positions its rank (nearly) keeps each key.
fn learned(
    selector: &Selector,
    [q, k, v]: &[Tensor<4>; 3],
    scores: &Tensor<3>,
    recent: usize,
) -> (Vec<f64>, Vec<f64>) {
    let scores = scores.clone().detach().require_grad();
    let keys = selector.select(scores.clone());
    let attention = Attention::new(q.clone(), k.clone(), v.clone()).intervals(&keys);
    let gradients = attention.forward().square().sum().backward();
    let far = ints(keys.runner_up_ends().expect("scores learn").clone());
    let len = scores.dims()[2];
    let positions = far.into_iter().enumerate().map(|(at, far)| {
        let from = at % len + recent;
        (far as usize).saturating_sub(from) as f64
    });
    (grad(&scores, &gradients), positions.collect())
}

/// The definition in f64, from the gradient of ranks that do not compete.
fn charged(gradient: &[f64], positions: &[f64], len: usize) -> Vec<f64> {
    let heads = gradient.chunks(len).zip(positions.chunks(len));
    let of_head = |(gradient, positions): (&[f64], &[f64])| {
        let all: f64 = positions.iter().sum();
        let sum: f64 = gradient.iter().sum();
        let charged = gradient.iter().zip(positions);
        let charged = charged.map(|(gradient, of_key)| gradient - of_key / all * sum);
        charged.collect::<Vec<f64>>()
    };
    heads.flat_map(of_head).collect()
}

fn what_the_keys_of_a_head_gain_is_charged_to_all(len: usize) {
    let (rows, scores) = inputs(len);
    let parts = |recent| {
        let selector = Selector::top(5).recent(recent);
        [
            selector.clone().runners_up(3),
            selector.clone().leave_one_out(true),
            selector.runners_up(3).leave_one_out(true),
        ]
    };
    for (recent, selector) in [0, 2].into_iter().flat_map(|r| parts(r).map(|s| (r, s))) {
        let (gradient, positions) = learned(&selector, &rows, &scores, recent);
        let (ours, _) = learned(&selector.compete(true), &rows, &scores, recent);
        let expected = charged(&gradient, &positions, len);
        let largest = size(&expected);
        assert!(largest > 1e-2, "{largest}");
        within(&ours, &expected, 1e-5 * (1.0 + largest), "charged");
        for (head, gradient) in ours.chunks(len).zip(gradient.chunks(len)) {
            let [ours, others] = [head, gradient].map(|of| of.iter().sum::<f64>());
            assert!(ours.abs() < 1e-4 * (1.0 + others.abs()), "{ours} {others}");
        }
    }
}

#[test]
fn what_the_keys_of_a_head_gain_is_charged_to_all_of_them() {
    what_the_keys_of_a_head_gain_is_charged_to_all(LEN);
}

/// Sums of long rows are sums of parts, the last of which is incomplete.
#[test]
fn long_rows_are_charged_alike() {
    what_the_keys_of_a_head_gain_is_charged_to_all(600);
}

#[test]
fn sinks_and_documents_have_the_positions_at_which_their_rank_counts() {
    let (rows, scores) = inputs(LEN);
    let documents = Documents::from_lengths([vec![8, 5], vec![LEN]]);
    let selector = Selector::top(4).sinks(1).documents(documents);
    let selector = selector.leave_one_out(true);
    let (gradient, _) = learned(&selector, &rows, &scores, 0);
    let (ours, _) = learned(&selector.compete(true), &rows, &scores, 0);
    // A sink is kept whatever its rank: it neither gains nor pays.
    for sink in [0, 8, LEN, 2 * LEN, 3 * LEN] {
        let head = sink / LEN;
        let is_sink = head < KV_HEADS || sink % LEN == 0;
        assert!(!is_sink || ours[sink] == 0.0, "{sink}: {}", ours[sink]);
    }
    assert_eq!(gradient[8], 0.0);
    for (head, ours) in ours.chunks(LEN).enumerate() {
        assert!(ours.iter().any(|x| x.abs() > 1e-3), "head {head}");
        assert!(ours.iter().sum::<f64>().abs() < 1e-4, "head {head}");
    }
}

/// A head whose keys are all hidden has nothing to centre.
#[test]
fn a_head_without_a_visible_key_learns_nothing() {
    let (rows, scores) = inputs(LEN);
    let scores = scores.zeros_like().add_scalar(f32::NEG_INFINITY);
    let selector = Selector::top(4).runners_up(2).compete(true);
    let (ours, _) = learned(&selector, &rows, &scores, 0);
    assert_eq!(ours, vec![0.0; ours.len()]);
}

fn config(compete: bool) -> DynamicMaskAttentionConfig {
    let learning = ScoreLearning::new().with_runners_up(Some(4));
    layer::config().with_learning(Some(learning.with_compete(compete)))
}

#[test]
fn a_layers_scores_compete_and_its_output_stays() {
    let plain = config(false).init(&Device::flex().autodiff());
    let layer = like(&plain, &config(true));
    let x = tokens_for(&plain, 2, 20);
    let [(ours, learned), (theirs, other)] = [&layer, &plain].map(|layer| {
        let out = layer.forward(x.clone());
        let learned = of_scores(layer, &out.clone().square().sum().backward());
        (values(out), learned)
    });
    assert_eq!(ours, theirs);
    assert!(learned.iter().all(|x| x.is_finite()));
    assert_ne!(learned, other);
}
