//! The mask of a layer's input: per key, and per pair of query and key.

use crate::case::{coin, grad, size, values, within};
use crate::layer::{self, Groups, tokens};
use burn::tensor::{Bool, Device, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, DynamicMaskInput, Scores,
};
use burn_flash_dma::{AttentionMask, Documents, Selector};

const LEN: usize = 23;

fn config() -> DynamicMaskAttentionConfig {
    layer::config()
        // Under such a mask, scores that only rank cannot be trained.
        .with_scores(Scores::Added)
        // A mask that differs between queries has no runners-up.
        .learning(|l| l.with_runners_up(Some(0)))
}

/// Layers that select keys in different ways.
fn layers(device: &Device) -> Vec<DynamicMaskAttention> {
    let configs = [
        config(),
        config().selection(|s| s.with_window(None)),
        config().selection(|s| s.with_window(Some(100))),
        config().selection(|s| s.with_recent(Some(2)).with_sinks(1)),
        config().selection(|s| s.with_recent(Some(5))),
        config().logits(|l| l.with_causal(false)),
        config().with_scores(Scores::Dma),
        config().logits(|l| l.with_sink(true)),
    ];
    configs.iter().map(|config| config.init(device)).collect()
}

fn x(device: &Device) -> Tensor<3> {
    tokens(2, LEN, device)
}

/// Output of a pass over tokens, and their gradient.
fn pass(x: &Tensor<3>, forward: impl FnOnce(Tensor<3>) -> Tensor<3>) -> [Vec<f64>; 2] {
    let x = Tensor::from_inner(x.clone().inner()).require_grad();
    let out = forward(x.clone());
    let grads = out.clone().powi_scalar(2).sum().backward();
    [values(out.inner()), grad(&x, &grads)]
}

/// The outputs of an input and the gradient of its tokens.
fn passes(
    layer: &DynamicMaskAttention,
    x: &Tensor<3>,
    input: impl FnOnce(Tensor<3>) -> DynamicMaskInput,
) -> [Vec<f64>; 2] {
    pass(x, |x| layer.forward(input(x)))
}

fn all(shape: [usize; 4], device: &Device) -> Tensor<4, Bool> {
    Tensor::full(shape, true, device)
}

fn close(actual: &[Vec<f64>; 2], expected: &[Vec<f64>; 2], what: &str) {
    for (name, (actual, expected)) in ["out", "dx"].iter().zip(actual.iter().zip(expected)) {
        let bound = 5e-6 * size(expected).max(1.0);
        within(actual, expected, bound, format_args!("{what}, {name}"));
    }
}

#[test]
fn hidden_keys_are_those_of_scores_of_minus_infinity() {
    let device = Device::flex().autodiff();
    for (at, layer) in layers(&device).iter().enumerate() {
        for shape in [[2, 2, 1, LEN], [1, 1, 1, LEN], [2, 1, 1, LEN], [2, 1, 1, 1]] {
            let (x, shown) = (x(&device), coin(shape, &device));
            let visible = AttentionMask::visible(shown.clone());
            let masked = passes(layer, &x, |x| DynamicMaskInput::new(x).mask(visible));
            let hidden = AttentionMask::hidden(shown.clone().bool_not());
            let same = passes(layer, &x, |x| DynamicMaskInput::new(x).mask(hidden));
            assert_eq!(masked, same);

            let expected = pass(&x, |x| {
                let scores = layer.scores(x.clone());
                let keys = shown.squeeze_dim::<3>(2).expand(scores.dims());
                let scores = scores.mask_fill(keys.bool_not(), f32::NEG_INFINITY);
                layer.forward_with_scores(x, scores)
            });
            close(&masked, &expected, &format!("layer {at}, mask {shape:?}"));
        }
    }
}

#[test]
fn a_mask_per_key_means_the_same_for_every_query() {
    let device = Device::flex().autodiff();
    for (at, layer) in layers(&device).iter().enumerate() {
        let (x, shown) = (x(&device), coin([2, 2, 1, LEN], &device));
        let documents = Documents::from_lengths([vec![9, 0, 14], vec![LEN]]);
        let input = |x, mask| {
            let input = DynamicMaskInput::new(x).lengths([LEN - 4, LEN]).mask(mask);
            match layer.options().causal {
                true => input.documents(documents.clone()),
                false => input,
            }
        };
        let by_key = passes(layer, &x, |x| {
            input(x, AttentionMask::visible(shown.clone()))
        });
        let wide = shown.clone().expand([2, 2, LEN, LEN]);
        let by_pair = passes(layer, &x, |x| input(x, AttentionMask::visible(wide)));
        close(&by_pair, &by_key, &format!("layer {at}"));
    }
}

#[test]
fn queries_do_not_see_what_the_mask_hides_from_them() {
    let device = Device::flex().autodiff();
    let layer = config().init(&device);
    let (x, hidden_key, query) = (x(&device), 3, 17);
    let pair = [0..1, 0..1, query..query + 1, hidden_key..hidden_key + 1];
    let pair = Tensor::<4>::zeros([1, 1, LEN, LEN], &device).slice_fill(pair, 1.0);
    let mask = AttentionMask::hidden(pair.greater_elem(0.5));
    let key = [0..2, hidden_key..hidden_key + 1, 0..32];
    let changed = x.clone().slice_fill(key, 2.5);
    let row = |x: Tensor<3>| {
        let out = layer.forward(DynamicMaskInput::new(x).mask(mask.clone()));
        values(out.narrow(1, query, 1).inner())
    };
    assert_eq!(row(x.clone()), row(changed.clone()));
    // Another query sees it, so its row changes.
    let other = |x: Tensor<3>| values(layer.forward(x).narrow(1, hidden_key, 1).inner());
    assert_ne!(other(x), other(changed));
}

#[test]
fn a_query_that_sees_nothing_gets_zeros() {
    let device = Device::flex().autodiff();
    for layer in layers(&device) {
        let mask = AttentionMask::hidden(all([1, 1, LEN, LEN], &device));
        let [out, grad] = passes(&layer, &x(&device), |x| DynamicMaskInput::new(x).mask(mask));
        assert!(out.iter().chain(&grad).all(|&x| x == 0.0));
    }
}

#[test]
fn padded_documents_are_padding_by_lengths() {
    let device = Device::flex().autodiff();
    let lengths = [LEN - 6, LEN];
    let documents = Documents::try_from_padded(lengths, LEN).expect("they fit");
    for layer in layers(&device) {
        if !layer.options().causal {
            continue;
        }
        let x = x(&device);
        let by_lengths = passes(&layer, &x, |x| DynamicMaskInput::new(x).lengths(lengths));
        let by_documents = passes(&layer, &x, |x| {
            DynamicMaskInput::new(x).documents(documents.clone())
        });
        close(&by_documents, &by_lengths, "padded documents");
        let shown = all([1, 1, LEN, LEN], &device);
        let by_pairs = passes(&layer, &x, |x| {
            let input = DynamicMaskInput::new(x).documents(documents.clone());
            input.mask(AttentionMask::visible(shown))
        });
        close(&by_pairs, &by_lengths, "padded documents under a mask");
    }
}

#[test]
fn an_empty_sequence_has_a_mask() {
    let device = Device::flex().autodiff();
    let layer = config().init(&device);
    for shape in [[1, 1, 1, 0], [1, 2, 0, 0]] {
        let mask = AttentionMask::visible(Tensor::empty(shape, &device));
        let input = DynamicMaskInput::new(Tensor::empty([1, 0, 32], &device));
        assert_eq!(layer.forward(input.mask(mask)).dims(), [1, 0, 32]);
    }
}

#[test]
fn bad_masks_are_refused() {
    let device = Device::flex().autodiff();
    let layer = config().init(&device);
    let masked = |shape| {
        let mask = AttentionMask::visible(all(shape, &device));
        DynamicMaskInput::new(x(&device)).mask(mask)
    };
    let kind = |layer: &DynamicMaskAttention, shape: [usize; 4]| {
        let refused = layer.try_forward(masked(shape)).err();
        refused.map(|error| error.kind())
    };
    assert_eq!(kind(&layer, [2, 2, LEN, LEN]), None);
    // One mask per query head is not one per key/value head.
    for shape in [
        [2, 4, 1, LEN],
        [3, 1, 1, LEN],
        [1, 1, 1, LEN + 1],
        [1, 1, 2, LEN],
    ] {
        assert_eq!(kind(&layer, shape), Some("Broadcast"), "{shape:?}");
    }
    let learning = config()
        .learning(|l| l.with_runners_up(Some(2)))
        .init(&device);
    assert_eq!(kind(&learning, [1, 1, 1, LEN]), None);
    assert_eq!(kind(&learning, [1, 1, LEN, LEN]), Some("MaskedSelection"));
    let error = layer.try_selection(masked([1, 1, LEN, LEN])).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("a selection to look at"), "{text}");
}

#[test]
fn a_selection_is_that_of_the_keys_that_are_shown() {
    let device = Device::flex().autodiff();
    let layer = config().init(&device);
    let (x, shown) = (x(&device), coin([2, 1, 1, LEN], &device));
    let input = || DynamicMaskInput::new(x.clone()).mask(AttentionMask::visible(shown.clone()));
    let scores = layer.scores(input());
    let hidden = shown.clone().squeeze_dim::<3>(2).bool_not();
    let hidden = hidden.expand([2, 2, LEN]);
    let infinite = scores.clone().equal_elem(f32::NEG_INFINITY);
    assert_eq!(infinite.into_data(), hidden.into_data());
    let selected = layer.selection(input()).into_tensor().into_data();
    let expected = Selector::top(5).select(scores).into_tensor().into_data();
    assert_eq!(selected, expected);
}
