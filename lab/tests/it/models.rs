//! Common parts of the arms, and agreement between the ways to evaluate a model. Flex draws for all threads of a
//! process from one generator: `drawn` makes the models, and waits for others.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor, TensorData};
use flash_dma_models::nn::Decoder;
use lab::arm::Arm;
use lab::recall::model::Model;
use lab::rng::Rng;
use lab::settings::{Settings, Size, Task};
use lab::text::answers::write;
use lab::text::corpus::Corpus;
use lab::text::losses::{Bin, evaluate};
use lab::text::windows::Windows;
use lab::text::{bytes, with_window};
use lab::train::drawn;
use std::collections::BTreeSet;

const LOCAL: Option<usize> = Some(8);

fn settings(arm: Arm, local_window: Option<usize>) -> Settings {
    Settings {
        arm,
        local_window,
        tokens: 64,
        window: (arm != Arm::Dense).then_some(16),
        seed: 5,
        ..Task::Text.settings(Size::Smallest)
    }
}

fn corpus() -> Corpus {
    Corpus {
        source: "letters".into(),
        bytes: (0..40_000u32).map(|n| b'a' + (n * n % 23) as u8).collect(),
    }
}

fn model(arm: Arm, local_window: Option<usize>) -> Decoder {
    made(&settings(arm, local_window), &Device::flex())
}

fn made(settings: &Settings, device: &Device) -> Decoder {
    let model = drawn(settings.seed, device, |device| {
        Ok(settings.decoder().try_init(device)?)
    });
    model.expect("it fits")
}

/// All parameters, and the ids by which an optimiser knows them.
fn named_parameters(model: &Decoder) -> Vec<(ParamId, TensorData)> {
    struct Read(Vec<(ParamId, TensorData)>);
    impl ModuleVisitor for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push((param.id, param.val().into_data()));
        }
    }
    let mut read = Read(Vec::new());
    model.visit(&mut read);
    read.0
}

/// All parameters.
fn parameters(model: &Decoder) -> Vec<TensorData> {
    let named = named_parameters(model).into_iter();
    named.map(|(_, data)| data).collect()
}

#[test]
fn arms_begin_with_equal_parameters_and_read_the_same_texts() {
    let corpus = corpus();
    let windows = Windows::new(&corpus, 64, 4, 16).unwrap();
    let device = Device::flex();
    let batch = |seed, first| {
        let texts = windows.batch(seed, [first, 3, 64], &device);
        texts.inputs.into_data()
    };
    assert_eq!(batch(1, 6), batch(1, 6));
    assert_ne!(batch(1, 6), batch(1, 9));
    assert_ne!(batch(1, 6), batch(2, 6));
    for local_window in [None, LOCAL] {
        let ours = parameters(&model(Arm::Ours, local_window));
        assert!(ours.len() > 20);
        for arm in [Arm::Dense, Arm::Sliding] {
            assert!(parameters(&model(arm, local_window)) == ours, "{arm:?}");
        }
    }
}

/// A corpus whose bytes tell which sixteenth of it they are in.
#[test]
fn every_part_of_a_corpus_is_trained_on_and_validated_with() {
    let block = |part| vec![part; 40_000];
    let bytes: Vec<u8> = (0..16).flat_map(block).collect();
    let source = "parts".into();
    let corpus = Corpus { source, bytes };
    let windows = Windows::new(&corpus, 64, 4, 1024).unwrap();
    let parts = |windows: &[&[u8]]| -> BTreeSet<u8> { windows.iter().map(|w| w[0]).collect() };
    let all: BTreeSet<u8> = (0..16).collect();
    assert_eq!(parts(&windows.long()), all);
    let drawn: Vec<&[u8]> = (0..400)
        .map(|n| windows.training(65, &mut Rng::new(1, n)))
        .collect();
    assert_eq!(parts(&drawn), all);
    // No byte of a training window is one of a validation window.
    let validating = windows.long();
    let inside =
        |byte: &u8| (validating.iter()).any(|of| of.as_ptr_range().contains(&(byte as *const u8)));
    assert!(
        !drawn
            .iter()
            .any(|text| inside(&text[0]) || inside(&text[64]))
    );
}

#[test]
fn losses_by_position_have_the_mean_of_those_by_window() {
    let corpus = corpus();
    let windows = Windows::new(&corpus, 64, 4, 16).unwrap();
    let (short, long) = (windows.short(), windows.long());
    assert_eq!((short.len(), long.len()), (16, 4));
    // The same bytes are predicted.
    let targets = |windows: &[&[u8]]| -> Vec<u8> {
        let targets = windows.iter().flat_map(|window| &window[1..]);
        targets.copied().collect()
    };
    assert_eq!(targets(&short), targets(&long));
    let model = model(Arm::Ours, None);
    for (windows, batch) in [(&short, 5), (&long, 2)] {
        let losses = evaluate(&model, windows, batch, &Device::flex()).unwrap();
        let weighted = |bin: &Bin| bin.loss * (bin.to - bin.from) as f64;
        let sum: f64 = losses.bins.iter().map(weighted).sum();
        assert!((sum / losses.length as f64 - losses.loss).abs() < 1e-5);
        let mean = losses.windows.iter().sum::<f64>() / windows.len() as f64;
        assert!((mean - losses.loss).abs() < 1e-5);
        let inputs = bytes(windows.iter().map(|w| &w[..w.len() - 1]), &Device::flex());
        let targets = bytes(windows.iter().map(|w| &w[1..]), &Device::flex());
        let whole = model.try_loss(inputs, targets).expect("it fits");
        let whole: f32 = whole.into_scalar();
        assert!((f64::from(whole) - losses.loss).abs() < 1e-5);
    }
}

/// The text that a model writes from its caches agrees with one pass over the whole text.
#[test]
fn answers_from_caches_are_those_of_one_pass() {
    let corpus = corpus();
    let texts = [&corpus.bytes[..150], &corpus.bytes[1000..1150]];
    let device = Device::flex();
    let local = [Arm::Ours, Arm::Sliding, Arm::Dense].map(|arm| (arm, LOCAL));
    for (arm, local_window) in local.into_iter().chain([(Arm::Ours, None)]) {
        let model = model(arm, local_window);
        let written = write(&model.for_generation(), &texts, 64, 6, &device).unwrap();
        let mut whole = texts.map(<[u8]>::to_vec);
        for _ in 0..6 {
            let tokens = bytes(whole.iter().map(|text| &text[..]), &device);
            let len = whole[0].len();
            let logits: Tensor<3> = model.forward(tokens).narrow(1, len - 1, 1);
            let next: Vec<i64> = logits.argmax(2).into_data().iter::<i64>().collect();
            for (text, next) in whole.iter_mut().zip(next) {
                text.push(next as u8);
            }
        }
        for (written, whole) in written.answers.iter().zip(&whole) {
            assert_eq!(written[..], whole[150..], "{arm:?} {local_window:?}");
        }
    }
}

/// A model that narrows its window equals one made with the narrow window, with the same parameters.
#[test]
fn another_window_leaves_the_parameters_and_their_numbers() {
    let device = Device::flex().autodiff();
    for arm in [Arm::Ours, Arm::Sliding] {
        let settings = settings(arm, LOCAL);
        let narrow = made(&settings, &device);
        let before = named_parameters(&narrow);
        let logits = |model: &Decoder| {
            let tokens = bytes(std::iter::once(&corpus().bytes[..64]), &device);
            model.forward(tokens).into_data()
        };
        let narrow_logits = logits(&narrow);
        let wide = with_window(narrow, &settings, Some(32)).expect("it fits");
        assert!(named_parameters(&wide) == before, "{arm:?}");
        assert_ne!(logits(&wide), narrow_logits, "{arm:?}");
        let again = with_window(wide, &settings, Some(16)).expect("it fits");
        assert_eq!(logits(&again), narrow_logits, "{arm:?}");
        let inputs = bytes(std::iter::once(&corpus().bytes[..64]), &device);
        let loss = again.try_loss_and_backward(inputs.clone(), inputs, None);
        let (_, backward) = loss.expect("it fits");
        assert!(backward().len() > 20, "{arm:?} goes on learning");
    }
}

/// A weight of the last layer, which is drawn after those of the scores before it.
fn weight_of_recall(arm: Arm) -> TensorData {
    let settings = Settings::of(Task::Recall, arm, Size::Small);
    let device = Device::flex().autodiff();
    let model = drawn(5, &device, |device| Ok(Model::new(&settings, device)?)).expect("it fits");
    let last = model.blocks.last().expect("the size has layers");
    last.attention.q_proj.weight.val().into_data()
}

#[test]
fn arms_of_recall_with_one_score_form_begin_with_equal_parameters() {
    let ours = weight_of_recall(Arm::Ours);
    for arm in [Arm::Dense, Arm::Frozen, Arm::Added] {
        assert_eq!(weight_of_recall(arm), ours, "{arm:?}");
    }
}
