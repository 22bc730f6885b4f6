//! The input and the options of a layer: padding by lengths, windows that change, scores from elsewhere.

use crate::case::values;
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput, ScoreForm,
};
use burn_flash_dma::{AttentionError, Documents, Intervals, ScoreRole, Selector, TensorName};

const LENGTHS: [usize; 4] = [19, 11, 1, 0];
const LEN: usize = 19;

/// Scores of either form, and what they are for.
const KINDS: [(ScoreForm, ScoreRole); 3] = [
    (ScoreForm::Zoh, ScoreRole::RankAndBias),
    (ScoreForm::Linear, ScoreRole::RankAndBias),
    (ScoreForm::Linear, ScoreRole::Rank),
];

fn config() -> DynamicMaskAttentionConfig {
    DynamicMaskAttentionConfig::new(32, 4)
        .with_n_kv_heads(Some(2))
        .with_keep_window(Some(5))
        .with_max_seq_len(Some(64))
}

fn input(device: &Device) -> Tensor<3> {
    let normal = Distribution::Normal(0.0, 1.0);
    Tensor::random([LENGTHS.len(), LEN, 32], normal, device)
}

fn close(actual: &[f64], expected: &[f64], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (at, (a, e)) in actual.iter().zip(expected).enumerate() {
        // Matrix products of other sizes may round apart.
        assert!((a - e).abs() < 2e-6, "{what}, element {at}: {a} is not {e}");
    }
}

/// Every combination of what padding could reach through.
fn configs() -> Vec<DynamicMaskAttentionConfig> {
    let mut configs = Vec::new();
    for (form, role) in KINDS {
        for window in [None, Some(5), Some(30)] {
            for causal in [true, false] {
                let config = config().with_keep_window(window).with_causal(causal);
                let config = config.with_score_form(form);
                configs.push(config.with_score_role(Some(role)));
            }
        }
    }
    configs
}

/// Outputs and gradients, whatever the padding holds.
#[test]
fn a_padded_sequence_equals_the_sequence_alone() {
    let device = Device::flex().autodiff();
    for config in configs() {
        let layer = config.init(&device);
        let (x, upstream) = (input(&device), input(&device));
        for padding in [0.3, f32::NAN, f32::INFINITY] {
            let what = format!("{config:?} padded with {padding}");
            let rows = |sequence: usize, length: usize| {
                x.clone().narrow(0, sequence, 1).narrow(1, 0, length)
            };
            let padded: Vec<Tensor<3>> = (LENGTHS.iter().enumerate())
                .map(|(sequence, &length)| {
                    let rest = Tensor::full([1, LEN, 32], padding, &device);
                    match length {
                        0 => rest,
                        LEN => rows(sequence, LEN),
                        _ => {
                            let rest = rest.narrow(1, length, LEN - length);
                            Tensor::cat(vec![rows(sequence, length), rest], 1)
                        }
                    }
                })
                .collect();
            let padded = Tensor::cat(padded, 0).detach().require_grad();
            let out = layer.forward(DynamicMaskInput::new(padded.clone()).lengths(LENGTHS));
            let grads = (out.clone() * upstream.clone()).sum().backward();
            let to_padded = padded.grad(&grads).unwrap();

            let mut alone = Vec::new();
            for (sequence, &length) in LENGTHS.iter().enumerate() {
                let of = |tensor: &Tensor<3>| {
                    let row = values(tensor.clone().narrow(0, sequence, 1));
                    let (tokens, rest) = row.split_at(length * 32);
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
                close(&to_padded, &values(x.grad(&alone_grads).unwrap()), &what);
            }
            let weight = layer.k_proj.weight.val();
            let (actual, expected) = (weight.grad(&grads), weight.grad(&alone_grads));
            let scale = 10.0 * 2e-6; // A sum over 31 tokens.
            let pairs = values(actual.unwrap())
                .into_iter()
                .zip(values(expected.unwrap()));
            for (a, e) in pairs {
                assert!((a - e).abs() < scale, "{what}: {a} is not {e}");
            }
        }
    }
}

#[test]
fn lengths_that_are_all_whole_change_nothing() {
    let device = Device::flex();
    let layer = config().init(&device);
    let x = input(&device);
    let whole = DynamicMaskInput::new(x.clone()).lengths(vec![LEN; 4]);
    assert_eq!(
        values(layer.forward(whole)),
        values(layer.forward(x.clone()))
    );
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
    let x = input(&device);
    let refused = |input: DynamicMaskInput| {
        let error = layer.try_forward(input.clone()).unwrap_err();
        assert_eq!(layer.try_selection(input.clone()).unwrap_err(), error);
        let scores = Tensor::zeros([4, 2, LEN], &device);
        let other = layer.try_forward_with_scores(input, scores).unwrap_err();
        assert_eq!(other, error);
        error
    };
    let lengths = |lengths: &[usize]| DynamicMaskInput::new(x.clone()).lengths(lengths);
    let (tensor, axis) = (TensorName::Lengths, 0);
    let (expected, actual) = (4, 3);
    assert_eq!(
        refused(lengths(&[1, 2, 3])),
        AttentionError::Shape {
            tensor,
            axis,
            expected,
            actual
        }
    );
    assert_eq!(
        refused(lengths(&[1, 20, 3, 4])).to_string(),
        "the length of a sequence is 20, past the limit of 19"
    );
    let narrow = DynamicMaskInput::new(x.clone().narrow(2, 0, 16));
    assert_eq!(
        refused(narrow).to_string(),
        "x must have size 32 on axis 2, but has 16"
    );
    let long = DynamicMaskInput::new(Tensor::zeros([1, 65, 32], &device));
    assert_eq!(
        refused(long).to_string(),
        "the number of tokens with rotary positions is 65, past the limit of 64"
    );
    let error = layer.try_forward_with_scores(x, Tensor::zeros([4, 4, LEN], &device));
    assert_eq!(
        error.unwrap_err().to_string(),
        "scores must have size 2 on axis 1, but has 4"
    );
}

#[test]
#[should_panic(expected = "the length of a sequence is 20, past the limit of 19")]
fn the_plain_form_panics_with_the_text() {
    let device = Device::flex();
    let input = DynamicMaskInput::new(input(&device)).lengths([20, 1, 1, 1]);
    let _ = config().init(&device).forward(input);
}

#[test]
fn scores_from_elsewhere_take_the_place_of_the_layers_own() {
    let device = Device::flex().autodiff();
    for (form, role) in KINDS {
        let config = config().with_score_form(form);
        let layer = config.with_score_role(Some(role)).init(&device);
        let x = input(&device);
        let own = layer.scores(x.clone());
        assert_eq!(
            values(layer.forward_with_scores(x.clone(), own)),
            values(layer.forward(x.clone()))
        );
        let normal = Distribution::Normal(0.0, 1.0);
        let other = Tensor::<3>::random([4, 2, LEN], normal, &device).require_grad();
        let padded = DynamicMaskInput::new(x.clone()).lengths(LENGTHS);
        let out = layer.forward_with_scores(padded, other.clone());
        let grads = out.square().sum().backward();
        let grad = values(other.grad(&grads).unwrap());
        for (at, grad) in grad.iter().enumerate() {
            let hidden = at % LEN >= LENGTHS[at / (2 * LEN)];
            assert!(!hidden || *grad == 0.0);
        }
        assert!(grad.iter().any(|&x| x != 0.0));
        assert_ne!(
            values(layer.forward_with_scores(x.clone(), other)),
            values(layer.forward(x))
        );
    }
}

fn parts(intervals: &Intervals) -> (Vec<i64>, Option<Vec<i64>>) {
    let numbers = |data: burn::tensor::TensorData| data.iter::<i64>().collect();
    let far = intervals.far().map(|far| numbers(far.clone().into_data()));
    (numbers(intervals.tensor().clone().into_data()), far)
}

/// With every option that reaches the selector, of a layer that learns and of one that does not.
#[test]
fn the_selection_is_that_of_the_selector() {
    let config = config().with_score_form(ScoreForm::Linear);
    let documents = Documents::from_lengths([vec![19], vec![8, 11], vec![1, 18], vec![6, 7, 6]]);
    for (config, selector) in [
        // A quarter of the window, unless something else is said.
        (config.clone(), Selector::top(5).runners_up(1)),
        (
            config.clone().with_keep_window(Some(12)),
            Selector::top(12).runners_up(3),
        ),
        (config.clone().with_runners_up(Some(0)), Selector::top(5)),
        (
            config.clone().with_score_form(ScoreForm::Zoh),
            Selector::top(5),
        ),
        (
            config.clone().with_recent(Some(2)),
            Selector::top(5).recent(2).runners_up(1),
        ),
        (
            config.clone().with_recent(Some(3)).with_sinks(Some(2)),
            Selector::top(5).recent(3).sinks(2).runners_up(1),
        ),
        (
            config.clone().with_sinks(Some(1)).with_runners_up(Some(4)),
            Selector::top(5).sinks(1).runners_up(4),
        ),
        // Without a window all keys are kept, whatever the parts of one are.
        (
            config
                .clone()
                .with_keep_window(None)
                .with_runners_up(Some(4)),
            Selector::top(usize::MAX),
        ),
    ] {
        let device = Device::flex().autodiff();
        let layer = config.init(&device);
        let x = DynamicMaskInput::new(input(&device)).lengths(LENGTHS);
        let scores = layer.scores(x.clone());
        let expected = parts(&selector.select(scores.clone()));
        assert_eq!(parts(&layer.selection(x.clone())), expected, "{config:?}");
        let default = config.score_form == ScoreForm::Linear;
        assert_eq!(
            expected.1.is_some(),
            config.runners_up.map_or(default, |n| n > 0) && config.keep_window.is_some()
        );

        let selector = selector.documents(documents.clone());
        let expected = parts(&selector.select(scores));
        let packed = x.documents(documents.clone());
        assert_eq!(parts(&layer.selection(packed)), expected, "{config:?}");

        let layer = layer.valid();
        let (_, far) = parts(&layer.selection(input(&Device::flex())));
        assert_eq!(far, None);
    }
}

/// Packed documents are attended as if each stood alone, with rotary positions, recent keys and sinks.
#[test]
fn packed_documents_equal_the_documents_alone() {
    let device = Device::flex();
    let packs = [vec![8, 11], vec![19], vec![1, 17, 1], vec![5, 0, 14]];
    for (form, role) in KINDS {
        for config in [
            config(),
            config().with_keep_window(None),
            config().with_recent(Some(2)).with_sinks(Some(1)),
        ] {
            let config = config.with_score_form(form).with_score_role(Some(role));
            let layer = config.init(&device);
            let x = input(&device);
            let packed =
                DynamicMaskInput::new(x.clone()).documents(Documents::from_lengths(packs.clone()));
            let out = layer.forward(packed);
            for (sequence, lengths) in packs.iter().enumerate() {
                let mut start = 0;
                for &length in lengths.iter().filter(|&&length| length > 0) {
                    let document = |tensor: &Tensor<3>| {
                        tensor
                            .clone()
                            .narrow(0, sequence, 1)
                            .narrow(1, start, length)
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

/// Runners-up change the gradients of the scores and nothing else.
#[test]
fn runners_up_change_no_output() {
    let device = Device::flex().autodiff();
    let config = config().with_score_form(ScoreForm::Linear);
    let layer = config.init(&device);
    let with = config
        .with_runners_up(Some(3))
        .init(&device)
        .load_record(layer.clone().into_record());
    let x = input(&device);
    assert_eq!(values(with.forward(x.clone())), values(layer.forward(x)));
}

#[test]
fn parts_of_a_window_that_do_not_fit_are_refused() {
    let device = Device::flex();
    let refused = |config: DynamicMaskAttentionConfig| config.try_init(&device).unwrap_err();
    let (recent, sinks, window) = (4, 2, 5);
    let parts = config().with_recent(Some(recent)).with_sinks(Some(sinks));
    let expected = AttentionError::WindowParts {
        recent,
        sinks,
        window,
    };
    assert_eq!(refused(parts.clone()), expected);
    for config in [config().with_recent(Some(1)), config().with_sinks(Some(1))] {
        let config = config.with_causal(false);
        assert_eq!(refused(config), AttentionError::SelectionNotCausal);
    }
    let mut layer = parts.with_keep_window(Some(6)).init(&device);
    assert_eq!(layer.try_set_keep_window(5).unwrap_err(), expected);
    assert_eq!(layer.options().keep_window, Some(6));
    layer.set_keep_window(None);

    let x = DynamicMaskInput::new(input(&device));
    let whole = Documents::from_lengths(vec![vec![LEN]; 4]);
    let error = config()
        .with_causal(false)
        .init(&device)
        .try_forward(x.clone().documents(whole));
    assert_eq!(error.unwrap_err(), AttentionError::SelectionNotCausal);
    let short = Documents::from_lengths(vec![vec![LEN - 1]; 4]);
    let error = config()
        .init(&device)
        .try_forward(x.clone().documents(short))
        .unwrap_err();
    assert!(
        matches!(error, AttentionError::DocumentTokens { .. }),
        "{error}"
    );
    let few = Documents::from_lengths(vec![vec![LEN]; 3]);
    let error = config()
        .init(&device)
        .try_forward(x.documents(few))
        .unwrap_err();
    assert!(
        matches!(error, AttentionError::DocumentBatch { .. }),
        "{error}"
    );
}

/// A window that changes between calls, against layers that were made with it.
#[test]
fn a_window_may_change_between_steps() {
    let device = Device::flex();
    let mut layer = config().init(&device);
    let record = layer.clone().into_record();
    let x = input(&device);
    let made = |window| -> DynamicMaskAttention {
        let layer = config().with_keep_window(window).init(&device);
        layer.load_record(record.clone())
    };
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

    assert_eq!(
        layer.try_set_keep_window(0).unwrap_err(),
        AttentionError::ZeroWindow
    );
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
    let x = input(&device);
    let scaled = |scale: f32| {
        let config = config().with_scale(Some(scale));
        config
            .init(&device)
            .load_record(layer.clone().into_record())
    };
    // The default for eight features.
    let default = scaled(1.0 / 8f32.sqrt());
    let expected = values(layer.forward(x.clone()));
    assert_eq!(values(default.forward(x.clone())), expected);
    assert_ne!(values(scaled(3.0).forward(x)), expected);
    let error = config().with_scale(Some(f32::NAN)).try_init(&device);
    assert!(matches!(error.unwrap_err(), AttentionError::Scale { .. }));
}
