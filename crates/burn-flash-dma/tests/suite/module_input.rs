//! Inputs and options of a layer: padding by lengths, changing windows, given scores.

use crate::case::{grad, ints, random, refused, refused_as, values, within};
use crate::layer::{self, Groups, WIDTH, like, tokens_for};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput, Rope, Scores, Selection,
};
use burn_flash_dma::{AttentionError, Documents, Intervals, Selector};

const LENGTHS: [usize; 4] = [19, 11, 1, 0];
const LEN: usize = 19;

const KINDS: [Scores; 3] = [Scores::Ranking, Scores::Dma, Scores::Added];

fn config() -> DynamicMaskAttentionConfig {
    layer::config().with_rope(Some(Rope::new(64)))
}

fn input(layer: &DynamicMaskAttention) -> Tensor<3> {
    tokens_for(layer, LENGTHS.len(), LEN)
}

fn close(actual: &[f64], expected: &[f64], what: &str) {
    // Matrix products of other sizes may round differently.
    within(actual, expected, 2e-6, what);
}

/// Every combination of options through which padding could leak.
fn configs() -> Vec<DynamicMaskAttentionConfig> {
    let mut configs = Vec::new();
    for scores in KINDS {
        for window in [None, Some(5), Some(30)] {
            for causal in [true, false] {
                let config = config()
                    .selection(|s| s.with_window(window))
                    .logits(|l| l.with_causal(causal));
                configs.push(config.with_scores(scores));
            }
        }
    }
    configs
}

/// Outputs and gradients, whatever the padding holds.
#[test]
fn a_padded_sequence_equals_the_sequence_alone() {
    for config in configs() {
        let layer = config.init(&Device::flex().autodiff());
        let (x, upstream) = (input(&layer), input(&layer));
        for padding in [0.3, f32::NAN, f32::INFINITY] {
            let what = format!("{config:?} padded with {padding}");
            let rows = |sequence: usize, length: usize| {
                x.clone().narrow(0, sequence, 1).narrow(1, 0, length)
            };
            let mut padded = x.clone();
            for (at, length) in LENGTHS.into_iter().enumerate() {
                if length < LEN {
                    padded = padded.slice_fill([at..at + 1, length..LEN, 0..WIDTH], padding);
                }
            }
            let padded = padded.detach().require_grad();
            let out = layer.forward(DynamicMaskInput::new(padded.clone()).lengths(LENGTHS));
            let grads = (out.clone() * upstream.clone()).sum().backward();
            let to_padded = padded.grad(&grads).unwrap();

            let mut alone = Vec::new();
            for (sequence, &length) in LENGTHS.iter().enumerate() {
                let of = |tensor: &Tensor<3>| {
                    let row = values(tensor.clone().narrow(0, sequence, 1));
                    let (tokens, rest) = row.split_at(length * WIDTH);
                    assert!(rest.iter().all(|&x| x == 0.0), "{what}");
                    tokens.to_vec()
                };
                let (out, to_padded) = (of(&out), of(&to_padded));
                if length > 0 {
                    let x = rows(sequence, length).detach().require_grad();
                    let expected = layer.forward(x.clone());
                    close(&out, &values(expected.clone()), &what);
                    let upstream = upstream.clone().narrow(0, sequence, 1);
                    let loss = (expected * upstream.narrow(1, 0, length)).sum();
                    alone.push((x, to_padded, loss));
                }
            }
            let losses = alone.iter().map(|(_, _, loss)| loss.clone()).collect();
            let alone_grads = Tensor::cat(losses, 0).sum().backward();
            for (x, to_padded, _) in alone {
                close(&to_padded, &grad(&x, &alone_grads), &what);
            }
            let weight = layer.k_proj.weight.val();
            let [actual, expected] = [&grads, &alone_grads].map(|grads| grad(&weight, grads));
            // A sum over 31 tokens.
            within(&actual, &expected, 10.0 * 2e-6, what);
        }
    }
}

#[test]
fn lengths_that_are_all_whole_change_nothing() {
    let layer = config().init(&Device::flex());
    let x = input(&layer);
    let whole = DynamicMaskInput::new(x.clone()).lengths(vec![LEN; 4]);
    let whole = values(layer.forward(whole));
    assert_eq!(whole, values(layer.forward(x.clone())));
    let scores = values(layer.scores(DynamicMaskInput::new(x.clone()).lengths(LENGTHS)));
    let plain = values(layer.scores(x));
    for (at, (padded, plain)) in scores.iter().zip(&plain).enumerate() {
        let hidden = at % LEN >= LENGTHS[at / (2 * LEN)];
        assert_eq!(*padded, if hidden { f64::NEG_INFINITY } else { *plain });
    }
}

#[test]
fn bad_inputs_are_refused() {
    let device = Device::flex();
    let layer = config().init(&device);
    let x = input(&layer);
    let refused = |input: DynamicMaskInput, text| {
        let error = layer.try_forward(input.clone()).unwrap_err();
        assert_eq!(layer.try_selection(input.clone()).unwrap_err(), error);
        let scores = Tensor::zeros([4, 2, LEN], &device);
        let other = layer.try_forward_with_scores(input, scores).unwrap_err();
        assert_eq!(other, error);
        assert_eq!(error.to_string(), text);
    };
    let lengths = |lengths: &[usize]| DynamicMaskInput::new(x.clone()).lengths(lengths);
    let long = Tensor::<3>::zeros([1, 65, WIDTH], &device);
    let text = "the lengths of the sequences must have size 4 on axis 0, but has 3";
    refused(lengths(&[1, 2, 3]), text);
    let text = "the length of a sequence is 20, past the limit of 19";
    refused(lengths(&[1, 20, 3, 4]), text);
    let text = "x must have size 32 on axis 2, but has 16";
    refused(x.clone().narrow(2, 0, 16).into(), text);
    let text = "the number of tokens with rotary positions is 65, past the limit of 64";
    refused(long.into(), text);
    let scores = Tensor::zeros([4, 4, LEN], &device);
    let text = "scores must have size 2 on axis 1, but has 4";
    refused_as(layer.try_forward_with_scores(x, scores), text);
}

#[test]
#[should_panic(expected = "the length of a sequence is 20, past the limit of 19")]
fn the_plain_form_panics_with_the_text() {
    let layer = config().init(&Device::flex());
    let _ = layer.forward(DynamicMaskInput::new(input(&layer)).lengths([20, 1, 1, 1]));
}

#[test]
fn scores_from_elsewhere_take_the_place_of_the_layers_own() {
    let device = Device::flex().autodiff();
    for scores in KINDS {
        let layer = config().with_scores(scores).init(&device);
        let x = input(&layer);
        let own = layer.scores(x.clone());
        let by_own = values(layer.forward_with_scores(x.clone(), own));
        assert_eq!(by_own, values(layer.forward(x.clone())));
        let other = random([4, 2, LEN], &device).require_grad();
        let padded = DynamicMaskInput::new(x.clone()).lengths(LENGTHS);
        let out = layer.forward_with_scores(padded, other.clone());
        let slopes = grad(&other, &out.square().sum().backward());
        for (at, slope) in slopes.iter().enumerate() {
            let hidden = at % LEN >= LENGTHS[at / (2 * LEN)];
            assert!(!hidden || *slope == 0.0);
        }
        assert!(slopes.iter().any(|&x| x != 0.0));
        let by_other = values(layer.forward_with_scores(x, other));
        assert_ne!(by_other, by_own);
    }
}

fn parts(intervals: &Intervals) -> (Vec<i64>, Option<Vec<i64>>) {
    let far = intervals.runner_up_ends().map(|far| ints(far.clone()));
    (ints(intervals.tensor().clone()), far)
}

/// With every option of the selector, for a layer that learns and one that does not.
#[test]
fn the_selection_is_that_of_the_selector() {
    let documents = Documents::from_lengths([vec![19], vec![8, 11], vec![1, 18], vec![6, 7, 6]]);
    // Compares positions only: runners-up, without the other learning from ranks.
    let new = || config().learning(|l| l.with_kept(false).with_compete(false));
    let top = || Selector::top(5).runners_up(8);
    let (recent, three) = (
        new().selection(|s| s.with_recent(Some(2))),
        new().selection(|s| s.with_recent(Some(3))),
    );
    let sink = new()
        .selection(|s| s.with_sinks(1))
        .learning(|l| l.with_runners_up(Some(4)));
    let all = new()
        .selection(|s| s.with_window(None))
        .learning(|l| l.with_runners_up(Some(4)));
    for (config, selector) in [
        (new(), top()),
        (
            new().selection(|s| s.with_window(Some(12))),
            Selector::top(12).runners_up(8),
        ),
        (
            new().with_selection(Selection::keep(48)),
            Selector::top(48).recent(12).runners_up(12),
        ),
        (
            new().with_selection(Selection::keep(8).with_sinks(7)),
            Selector::top(8).recent(1).sinks(7).runners_up(8),
        ),
        (
            new().learning(|l| l.with_runners_up(Some(0))),
            Selector::top(5),
        ),
        (config().with_scores(Scores::Dma), Selector::top(5)),
        (recent, top().recent(2)),
        (
            three.selection(|s| s.with_sinks(2)),
            top().recent(3).sinks(2),
        ),
        (sink, top().sinks(1).runners_up(4)),
        // Without a window all keys are kept, whatever its parts.
        (all, Selector::top(usize::MAX)),
    ] {
        let layer = config.init(&Device::flex().autodiff());
        let x = DynamicMaskInput::new(input(&layer)).lengths(LENGTHS);
        let scores = layer.scores(x.clone());
        let expected = parts(&selector.select(scores.clone()));
        assert_eq!(parts(&layer.selection(x.clone())), expected, "{config:?}");
        let default = config.scores != Scores::Dma;
        let learning = config.learning.as_ref();
        let given = learning.and_then(|learning| learning.runners_up);
        let learns = given.map_or(default, |n| n > 0) && config.selection.window.is_some();
        assert_eq!(expected.1.is_some(), learns);

        let selector = selector.documents(documents.clone());
        let expected = parts(&selector.select(scores));
        let packed = x.documents(documents.clone());
        assert_eq!(parts(&layer.selection(packed)), expected, "{config:?}");

        let layer = layer.valid();
        let (_, far) = parts(&layer.selection(input(&layer)));
        assert_eq!(far, None);
    }
}

/// Packed documents are attended as if each stood alone, with rotary positions, recent keys and sinks.
#[test]
fn packed_documents_equal_the_documents_alone() {
    let packs = [vec![8, 11], vec![19], vec![1, 17, 1], vec![5, 0, 14]];
    for scores in KINDS {
        for config in [
            config(),
            config().selection(|s| s.with_window(None)),
            config().selection(|s| s.with_recent(Some(2)).with_sinks(1)),
        ] {
            let config = config.with_scores(scores);
            let layer = config.init(&Device::flex());
            let x = input(&layer);
            let packed =
                DynamicMaskInput::new(x.clone()).documents(Documents::from_lengths(packs.clone()));
            let out = layer.forward(packed);
            for (sequence, lengths) in packs.iter().enumerate() {
                let mut start = 0;
                for &length in lengths.iter().filter(|&&length| length > 0) {
                    let document = |tensor: &Tensor<3>| {
                        let sequence = tensor.clone().narrow(0, sequence, 1);
                        sequence.narrow(1, start, length)
                    };
                    let what = format!("{config:?}, {start} to {}", start + length);
                    let alone = layer.forward(document(&x));
                    close(&values(document(&out)), &values(alone), &what);
                    start += length;
                }
            }
        }
    }
}

#[test]
fn runners_up_change_no_output() {
    let layer = config().init(&Device::flex().autodiff());
    let with = like(&layer, &config().learning(|l| l.with_runners_up(Some(3))));
    let x = input(&layer);
    assert_eq!(values(with.forward(x.clone())), values(layer.forward(x)));
}

#[test]
fn parts_of_a_window_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let (recent, sinks, window) = (4, 2, 5);
    let parts = config().selection(|s| s.with_recent(Some(recent)).with_sinks(sinks));
    let expected = AttentionError::WindowParts {
        recent,
        sinks,
        window,
    };
    assert_eq!(parts.try_init(&device).unwrap_err(), expected);
    for config in [
        config().selection(|s| s.with_recent(Some(1))),
        config().selection(|s| s.with_sinks(1)),
    ] {
        let config = config.logits(|l| l.with_causal(false));
        refused(config.try_init(&device), "SelectionNotCausal");
    }
    let mut layer = parts.selection(|s| s.with_window(Some(6))).init(&device);
    assert_eq!(layer.try_set_keep_window(5).unwrap_err(), expected);
    assert_eq!(layer.options().keep_window, Some(6));
    layer.set_keep_window(None);

    let x = DynamicMaskInput::new(input(&layer));
    for (causal, lengths, kind) in [
        (false, vec![vec![LEN]; 4], "SelectionNotCausal"),
        (true, vec![vec![LEN - 1]; 4], "DocumentTokens"),
        (true, vec![vec![LEN]; 3], "DocumentBatch"),
    ] {
        let layer = config().logits(|l| l.with_causal(causal)).init(&device);
        let packed = x.clone().documents(Documents::from_lengths(lengths));
        refused(layer.try_forward(packed), kind);
    }
}

/// Compares a window that changes between calls with layers made with it.
#[test]
fn a_window_may_change_between_steps() {
    let mut layer = config().init(&Device::flex());
    let first = layer.clone();
    let made = |window| like(&first, &config().selection(|s| s.with_window(window)));
    let x = input(&layer);
    let mut outputs = Vec::new();
    for window in [Some(19), Some(8), Some(3), None, Some(1)] {
        layer.set_keep_window(window);
        assert_eq!(layer.options().keep_window, window);
        let out = values(layer.forward(x.clone()));
        assert_eq!(out, values(made(window).forward(x.clone())), "{window:?}");
        outputs.push(out);
    }
    close(&outputs[0], &outputs[3], "a window as long as the sequence");
    assert!(outputs[1] != outputs[0] && outputs[2] != outputs[1] && outputs[4] != outputs[2]);

    refused(layer.try_set_keep_window(0), "ZeroWindow");
    assert_eq!(layer.options().keep_window, Some(1));
    let other = layer.clone().with_keep_window(8).with_deterministic(true);
    assert_eq!(values(other.forward(x)), outputs[1]);
    assert!(other.options().deterministic && !layer.options().deterministic);
}

#[test]
#[should_panic(expected = "the keep window must be at least 1")]
fn a_window_of_no_keys_panics() {
    let _ = config().init(&Device::flex()).with_keep_window(0);
}

#[test]
fn the_scale_is_that_of_the_configuration() {
    let device = Device::flex();
    let layer = config().init(&device);
    let x = input(&layer);
    let scaled = |scale: f32| like(&layer, &config().logits(|l| l.with_scale(Some(scale))));
    // The default for eight features.
    let default = scaled(1.0 / 8f32.sqrt());
    let expected = values(layer.forward(x.clone()));
    assert_eq!(values(default.forward(x.clone())), expected);
    assert_ne!(values(scaled(3.0).forward(x)), expected);
    let none = config().logits(|l| l.with_scale(Some(f32::NAN)));
    refused(none.try_init(&device), "Scale");
}
