//! Kept keys that learn their worth, by the definition: the output with each key and without it.

use crate::case::{self, data, grad, normal, uniform, values, within};
use crate::layer::{self, like, of_scores, tokens_for};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, ScoreLearning};
use burn_flash_dma::{Attention, Documents, Intervals, OWN_OUTPUT_WEIGHT, Selector};
use flash_dma_reference::Rng;

const LEN: usize = 13;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;

/// Everything that selects the keys of a call, and whether there is a sink logit.
struct Rule {
    selector: Selector,
    recent: usize,
    /// First token of each document, and its number of sinks.
    starts: Vec<usize>,
    sinks: usize,
    sink_logits: bool,
}

/// With a loss that is linear in the output, a key kept by its rank is worth the loss lost if every query has the
/// output itself, with its own weight, in place of the key.
fn check(rule: &Rule) {
    let device = Device::flex().autodiff();
    let mut rng = Rng::new(31);
    let mut random = |heads: usize| normal(&mut rng, [1, heads, LEN, DIM], &device);
    // Logits large enough that some keys have nearly all of a query's weight.
    let (q, k, v) = (random(HEADS) * 2.0, random(KV_HEADS), random(KV_HEADS));
    let loss_of = random(HEADS);
    let sink = normal(&mut rng, [HEADS], &device);
    let attend = |keys: &Intervals| {
        let attention = Attention::new(q.clone(), k.clone(), v.clone()).intervals(keys);
        let out_and_lse = match rule.sink_logits {
            true => attention.try_forward_with_sink(sink.clone()),
            false => attention.try_forward_with_lse(),
        };
        out_and_lse.expect("it fits")
    };

    let rank = normal(&mut rng, [1, KV_HEADS, LEN], &device).require_grad();
    let keys = rule.selector.select(rank.clone());
    let (out, lse) = attend(&keys);
    let gradients = (out.clone() * loss_of.clone()).sum().backward();
    let ours = grad(&rank, &gradients);

    let ends = keys.tensor().clone().narrow(3, 1, 1).into_data();
    let ends: Vec<i32> = ends.iter::<i32>().collect();
    let lost_with = |ends: &[i32]| {
        let ends = data(ends.iter().copied(), [1, KV_HEADS, LEN]);
        let keys = Intervals::try_from_ends(Tensor::from_data(ends, &device)).expect("good ends");
        let (others, of_others) = attend(&keys);
        let rest = (of_others - lse.clone()).exp();
        let share = rest.clone() / (rest + OWN_OUTPUT_WEIGHT);
        let lost = (out.clone() - others) * loss_of.clone() * share.unsqueeze_dim::<4>(3);
        lost.sum().into_scalar::<f32>()
    };
    let mut learned = 0;
    for (at, ours) in ours.iter().enumerate() {
        let key = at % LEN;
        let start = rule.starts.iter().rfind(|&&start| start <= key);
        let start = *start.expect("the first is 0");
        let mut without = ends.clone();
        if key - start >= rule.sinks {
            without[at] = ends[at].min((key + rule.recent) as i32);
        }
        let worth = f64::from(lost_with(&without));
        learned += usize::from(worth.abs() > 1e-2);
        let error = (ours - worth).abs();
        assert!(error < 1e-4 * (1.0 + worth.abs()), "{at}: {ours} {worth}");
    }
    assert!(learned > KV_HEADS * LEN / 3, "{learned} keys learn");
}

#[test]
fn a_rank_learns_what_the_loss_is_without_each_key_that_it_keeps() {
    for sink_logits in [false, true] {
        for (recent, sinks) in [(0, 0), (2, 0), (0, 1), (1, 2)] {
            let parts = Selector::top(5).recent(recent).sinks(sinks);
            let parts = parts.leave_one_out(true);
            let packed = |lengths| parts.clone().documents(Documents::from_lengths([lengths]));
            for (selector, starts) in [
                (parts.clone(), vec![0]),
                (packed(vec![LEN]), vec![0]),
                (packed(vec![8, 5]), vec![0, 8]),
            ] {
                check(&Rule {
                    selector,
                    recent,
                    starts,
                    sinks,
                    sink_logits,
                });
            }
        }
    }
}

/// Equal documents are selected in rows of their own.
#[test]
fn sinks_of_equal_documents_learn_nothing() {
    let documents = Documents::from_lengths([vec![6, 6]]);
    let device = Device::flex().autodiff();
    let rank = uniform([1, 1, 12], &device).require_grad();
    let selector = Selector::top(3).sinks(1).documents(documents);
    let keys = selector.leave_one_out(true).select(rank.clone());
    let random = || uniform([1, 1, 12, DIM], &device);
    let out = Attention::new(random(), random(), random()).intervals(&keys);
    let gradients = out.forward().square().sum().backward();
    let learned = grad(&rank, &gradients);
    assert_eq!([learned[0], learned[6]], [0.0; 2]);
    for document in learned.chunks(6) {
        let others = document[1..].iter().any(|learned| *learned != 0.0);
        assert!(others, "{learned:?}");
    }
}

#[test]
fn what_kept_keys_and_what_runners_up_learn_add_up() {
    let device = Device::flex().autodiff();
    device.seed(32);
    let random = |heads: usize| case::random([2, heads, LEN, DIM], &device);
    let q = random(HEADS).require_grad();
    let [k, v] = [(); 2].map(|()| random(KV_HEADS));
    let rank = uniform([2, KV_HEADS, LEN], &device);
    let learned = |selector: Selector| {
        let rank = rank.clone().require_grad();
        let keys = selector.select(rank.clone());
        let attention = Attention::new(q.clone(), k.clone(), v.clone()).intervals(&keys);
        let gradients = attention.forward().square().sum().backward();
        rank.grad(&gradients).map(values)
    };
    let base = || Selector::top(4).recent(1);
    assert_eq!(learned(base()), None);
    let of_kept = learned(base().leave_one_out(true)).expect("they learn");
    let of_next = learned(base().runners_up(2)).expect("they learn");
    let of_both = learned(base().runners_up(2).leave_one_out(true)).expect("they learn");
    assert!(of_kept.iter().zip(&of_next).any(|(a, b)| a * b != 0.0));
    let sum = of_kept.iter().zip(of_next).map(|(kept, next)| kept + next);
    within(&of_both, &sum.collect::<Vec<_>>(), 1e-5, "both");
}

fn config(kept: bool) -> DynamicMaskAttentionConfig {
    let learning = ScoreLearning::none().with_tokens(true);
    layer::config().with_learning(Some(learning.with_kept(kept)))
}

#[test]
fn a_layers_scores_learn_by_what_it_keeps_and_its_output_stays() {
    let plain = config(false).init(&Device::flex().autodiff());
    let layer = like(&plain, &config(true));
    // With as many kept keys as tokens nothing is evicted, and kept keys learn all the same.
    for len in [5, 20] {
        let x = tokens_for(&plain, 2, len);
        let (ours, theirs) = (layer.forward(x.clone()), plain.forward(x));
        assert_eq!(values(ours.clone()), values(theirs));
        let learned = of_scores(&layer, &ours.square().sum().backward());
        assert!(learned.iter().any(|x| x.abs() > 1e-9), "{len} tokens");
    }
}

#[test]
fn an_inner_device_has_nothing_to_learn() {
    let layer = config(true).init(&Device::flex());
    let keys = layer.selection(tokens_for(&layer, 1, 20));
    assert!(keys.runner_up_ends().is_none());
}
