//! The gradient of a sequence in parts is that of the whole.
#![cfg(all(feature = "flex", feature = "autodiff"))]

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_dma::nn::{
    DynamicMaskAttentionConfig, Logits, Rope, ScoreLearning, Scores, Selection,
};
use burn_flash_dma::train::DeviceGroup;
use burn_flash_dma::{AttentionError, Documents};
use flash_dma_models::nn::{Decoder, DecoderConfig, TokenInput};

/// Gradients by name; empty where there is none.
struct ByName<'a> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    all: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for ByName<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.gradients.get::<D>(param.id);
        let numbers = gradient.map(|gradient| gradient.into_data().iter::<f32>().collect());
        self.all
            .push((self.path.join("."), numbers.unwrap_or_default()));
    }
}

fn by_name(model: &Decoder, gradients: &GradientsParams) -> Vec<(String, Vec<f32>)> {
    let mut by_name = ByName {
        gradients,
        path: Vec::new(),
        all: Vec::new(),
    };
    model.visit(&mut by_name);
    by_name.all
}

fn attention(window: usize) -> DynamicMaskAttentionConfig {
    DynamicMaskAttentionConfig::new(32, 4)
        .with_n_kv_heads(Some(2))
        .with_rope(Some(Rope::new(200)))
        .with_selection(Selection::keep(window))
}

fn sequence(len: usize) -> [Tensor<2, Int>; 2] {
    let numbers = (0..2 * (len + 1)).map(|at| (at * at * 31 + at / 3) as i32 % 256);
    let numbers = TensorData::new(numbers.collect::<Vec<_>>(), [2, len + 1]);
    let tokens = Tensor::<2, Int>::from_data(numbers, &Device::flex());
    [0, 1].map(|from| tokens.clone().narrow(1, from, len))
}

fn group(devices: usize) -> DeviceGroup {
    DeviceGroup::try_new(&vec![Device::flex(); devices]).expect("one device, several times")
}

/// Compares parts of each of these lengths, and parts on two, three and five devices, with the whole, of sequences of 60 tokens.
/// The parts come first, as a new model's parameters are made only when they are first read.
fn check(config: &DecoderConfig, documents: Option<&Documents>, parts: &[usize]) {
    let device = Device::flex().autodiff();
    device.seed(5);
    let model = config.init(&device);
    let [tokens, targets] = sequence(60);
    let input = || {
        let input = TokenInput::new(tokens.clone());
        match documents {
            Some(documents) => input.documents(documents.clone()),
            None => input,
        }
    };
    let in_time = parts.iter().map(|&part| {
        let all = model.try_loss_and_gradients_in_parts(input(), targets.clone(), None, part);
        (format!("in parts of {part}"), all)
    });
    let over = [2, 3, 5].map(|devices| {
        let mut group = group(devices);
        let all = model.try_loss_and_gradients_over(&mut group, input(), targets.clone(), None);
        (format!("over {devices} devices"), all)
    });
    let streamed: Vec<_> = in_time
        .chain(over)
        .map(|(how, all)| {
            let (loss, gradients) = all.expect("it fits");
            (how, loss.into_scalar::<f32>(), by_name(&model, &gradients))
        })
        .collect();
    let whole = model.try_loss_and_backward(input(), targets.clone(), None);
    let (loss, backward) = whole.expect("it fits");
    let whole = by_name(&model, &backward());
    let loss = loss.into_scalar::<f32>();
    for (how, streamed, in_parts) in streamed {
        assert!((streamed - loss).abs() < 1e-5, "{streamed}, not {loss}");
        assert_same(&whole, &in_parts, &how);
    }
}

/// Holds gradients to those of the whole sequence.
fn assert_same(whole: &[(String, Vec<f32>)], parts: &[(String, Vec<f32>)], how: &str) {
    for ((name, whole), (_, parts)) in whole.iter().zip(parts) {
        assert_eq!(whole.len(), parts.len(), "{name} {how}");
        let most = whole.iter().fold(0f32, |most, x| most.max(x.abs()));
        let far = whole.iter().zip(parts).map(|(a, b)| (a - b).abs());
        let far = far.fold(0f32, f32::max);
        assert!(
            far <= 2e-5 * most + 1e-9,
            "{how}: {name}: off by {far} of {most}"
        );
    }
}

#[test]
fn a_default_decoder_in_parts_has_the_gradient_of_the_whole() {
    let config = DecoderConfig::new(attention(12), 4).with_local_window(Some(5));
    // The last part may be short, and parts shorter than windows.
    check(&config, None, &[60, 20, 17, 7, 1]);
}

/// One way at a time in which a layer differs from the default.
#[test]
fn so_has_every_layer_that_can_be_read_in_parts() {
    let learning = ScoreLearning::new;
    let layers = [
        attention(12).with_selection(Selection::keep(12).with_sinks(2)),
        attention(12).with_selection(Selection::keep(12).with_recent(Some(0))),
        attention(12).with_selection(Selection::keep(12).with_recent(Some(11))),
        attention(12).with_selection(Selection::last(12)),
        attention(12).with_selection(Selection::keep(12).with_recency(false)),
        attention(12).with_selection(Selection::keep(12).with_turns(Some(3))),
        attention(12).with_learning(Some(learning().with_compete(false))),
        attention(12).with_learning(Some(learning().with_kept(false))),
        attention(12).with_learning(Some(learning().with_runners_up(Some(0)))),
        attention(12).with_learning(Some(learning().with_runners_up(Some(40)))),
        attention(12).with_learning(Some(ScoreLearning::none())),
        attention(12).with_logits(Logits::new().with_sink(true).with_softcap(Some(5.0))),
        attention(50),
    ];
    for layer in layers {
        let config = DecoderConfig::new(layer, 2).with_local_window(None);
        check(&config, None, &[25, 11]);
    }
}

/// Documents that begin and end on a boundary, within a part and over several, short and empty ones.
#[test]
fn documents_may_be_cut_anywhere() {
    let selections = [
        Selection::keep(12),
        Selection::keep(12).with_sinks(3),
        Selection::last(12),
    ];
    let documents = [
        [vec![20, 13, 27], vec![60]],
        [vec![7, 1, 0, 33, 19], vec![40, 20]],
        [vec![1; 60], vec![3, 57]],
    ];
    for selection in selections {
        let layer = attention(12).with_selection(selection);
        let config = DecoderConfig::new(layer, 2).with_local_window(Some(5));
        for documents in documents.clone() {
            let documents = Documents::from_lengths(documents);
            check(&config, Some(&documents), &[60, 20, 11, 4]);
        }
    }
}

/// Freezes the projections of scores.
struct Freeze(String);

impl ModuleMapper for Freeze {
    fn enter_module(&mut self, name: &str, _: &str) {
        name.clone_into(&mut self.0);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.0.as_str() {
            "score_proj" => param.set_require_grad(false),
            _ => param,
        }
    }
}

/// Scores that were trained before, as when adapters are: their projection gets no gradient, and the rest the same.
#[test]
fn frozen_scores_stay_as_they_are() {
    let device = Device::flex().autodiff();
    let config = DecoderConfig::new(attention(12), 2).with_local_window(None);
    let model = config.init(&device).map(&mut Freeze(String::new()));
    let [tokens, targets] = sequence(60);
    let whole = model.try_loss_and_backward(tokens.clone(), targets.clone(), None);
    let whole = by_name(&model, &(whole.expect("it fits").1)());
    let mut group = group(3);
    let over = model.try_loss_and_gradients_over(&mut group, tokens.clone(), targets.clone(), None);
    let in_parts = model.try_loss_and_gradients_in_parts(tokens, targets, None, 25);
    for (name, whole) in &whole {
        assert_eq!(whole.is_empty(), name.contains("score_proj"), "{name}");
    }
    for (how, all) in [("over 3 devices", over), ("in parts of 25", in_parts)] {
        let (_, gradients) = all.expect("it fits");
        assert_same(&whole, &by_name(&model, &gradients), how);
    }
}

#[test]
fn documents_of_other_sequences_and_padding_are_refused() {
    let model = DecoderConfig::new(attention(12), 2).init(&Device::flex().autodiff());
    let [tokens, targets] = sequence(20);
    let refusal = |input: TokenInput| {
        let refused = model.try_loss_and_gradients_in_parts(input, targets.clone(), None, 8);
        refused.expect_err("it is refused").to_string()
    };
    let input = || TokenInput::new(tokens.clone());
    let padding = "padding in sequences that are read in parts";
    for (input, text) in [
        (input().lengths([20, 13]), padding),
        (
            input().documents(Documents::try_from_padded([20, 13], 20).expect("they fit")),
            padding,
        ),
        (input().documents(Documents::from_lengths([vec![20]])), "1"),
        (
            input().documents(Documents::from_lengths([vec![20], vec![19]])),
            "19",
        ),
    ] {
        let refusal = refusal(input);
        assert!(refusal.contains(text), "{refusal}");
    }
}

#[test]
fn a_layer_without_a_bound_is_refused() {
    let device = Device::flex().autodiff();
    let logits = |logits: Logits| attention(12).with_logits(logits);
    for (layer, reason) in [
        (
            attention(12).with_selection(Selection::new()),
            "keeps all keys",
        ),
        (
            attention(12).with_scores(Scores::Dma),
            "adds scores to the logits",
        ),
        (
            attention(12).with_scores(Scores::Added),
            "adds scores to the logits",
        ),
        (logits(Logits::new().with_dropout(0.1)), "has dropout"),
        (
            attention(12).with_learning(Some(ScoreLearning::new().with_tokens(true))),
            "has tokens that learn through their scores",
        ),
    ] {
        let config = DecoderConfig::new(layer, 1).with_local_window(None);
        let model = config.init(&device);
        let [tokens, targets] = sequence(20);
        let refused = model.try_loss_and_gradients_in_parts(tokens, targets, None, 10);
        let Err(AttentionError::Unsupported { what }) = refused else {
            panic!("a layer that {reason} was read")
        };
        assert_eq!(
            what,
            format!("a sequence in parts by a layer that {reason}")
        );
    }
}
