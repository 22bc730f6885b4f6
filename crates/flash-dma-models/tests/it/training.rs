//! Training of a decoder: it learns, with kept and with recomputed activations, and reports its layers' selections.
#![cfg(all(feature = "flex", feature = "autodiff"))]

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Selection};
use burn_flash_dma::train::{AdamWConfig, clip_gradients};
use flash_dma_models::nn::{Activations, Decoder, DecoderConfig};

/// Two rows of 24 repeating numbers, and the numbers that follow them.
fn batch() -> [Tensor<2, Int>; 2] {
    let tokens = Tensor::<1, Int>::arange(0..49, &Device::flex()).remainder_scalar(7);
    [0, 1].map(|from| tokens.clone().narrow(0, from, 48).reshape([2, 24]))
}

fn config() -> DecoderConfig {
    let attention = DynamicMaskAttentionConfig::new(32, 2)
        .with_n_kv_heads(Some(1))
        .with_rope(Some(Rope::new(24)))
        .with_selection(Selection::keep(6));
    DecoderConfig::new(attention, 2).with_local_window(None)
}

/// A model of the configuration with the parameters of another one.
fn model(config: &DecoderConfig, parameters: &Decoder) -> Decoder {
    let model = config.init(&Device::flex().autodiff());
    model.load_record(parameters.clone().into_record())
}

/// Losses of some steps, and the model after them.
fn train(mut model: Decoder) -> (Vec<f32>, Decoder) {
    let mut optimiser = AdamWConfig::new().init();
    let [inputs, targets] = batch();
    let step = |_| {
        let loss = model.try_loss_and_backward(inputs.clone(), targets.clone(), None);
        let (loss, backward) = loss.expect("it fits");
        let mut gradients = backward();
        clip_gradients(&model, &mut gradients, 1.0);
        model = optimiser.step(0.01, model.clone(), gradients);
        loss.into_scalar::<f32>()
    };
    ((0..20).map(step).collect(), model)
}

#[test]
fn a_decoder_that_recomputes_its_blocks_learns_the_same() {
    let parameters = config().init(&Device::flex().autodiff());
    let [kept, recomputed] = [Activations::Kept, Activations::Recomputed]
        .map(|activations| train(model(&config().with_activations(activations), &parameters)).0);
    // Untrained, every byte is equally likely.
    assert!((kept[0] - 256f32.ln()).abs() < 0.5, "{kept:?}");
    assert!(kept[19] < kept[0] - 2.0, "{kept:?}");
    for (kept, recomputed) in kept.iter().zip(&recomputed) {
        assert!((kept - recomputed).abs() < 1e-4, "{kept} and {recomputed}");
    }
}

#[test]
fn sixteen_bit_activations_train_f32_parameters() {
    struct Types(Vec<DType>);
    impl ModuleVisitor for Types {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.val().dtype());
        }
    }
    let config = config().with_dtype(FloatDType::BF16);
    let (losses, model) = train(config.init(&Device::flex().autodiff()));
    assert!(losses[19] < losses[0] - 1.0, "{losses:?}");
    let mut types = Types(Vec::new());
    model.visit(&mut types);
    assert!(types.0.len() > 10 && types.0.iter().all(|&dtype| dtype == DType::F32));
}

#[test]
fn short_texts_have_as_large_a_share_of_the_keys_in_the_layers_that_choose() {
    let mut config = config()
        .with_local_window(Some(5))
        .with_dense_layers(vec![4]);
    config.attention = config.attention.with_selection(Selection::keep(40));
    config.layers = 4;
    let mut model = config.init(&Device::flex());
    let windows = |model: &Decoder| -> Vec<Option<usize>> {
        let layers = model.blocks.iter().map(|block| &block.attention);
        layers.map(|layer| layer.options().keep_window).collect()
    };
    for (divisor, window) in [(4, 10), (8, 8), (1, 40)] {
        model.try_set_share(divisor).expect("it fits");
        assert_eq!(windows(&model), [Some(5), Some(window), Some(5), None]);
    }
}

#[cfg(feature = "train")]
mod of_text {
    use super::*;
    use crate::dir::Dir;
    use burn_flash_dma::nn::DynamicMaskAttentionConfig;
    use flash_dma_models::{FolderError, TextTraining, TrainingError};
    use std::path::Path;

    fn training() -> TextTraining {
        let attention = DynamicMaskAttentionConfig::new(16, 2)
            .with_rope(Some(Rope::new(128)))
            .with_selection(Selection::keep(16));
        TextTraining::new(DecoderConfig::new(attention, 1), 128)
            .with_batch(2)
            .with_steps(8)
            .with_evaluations(4)
            .with_curriculum("0.5".parse().expect("a share"))
    }

    fn text() -> Vec<u8> {
        b"it was the best of times. ".repeat(60)
    }

    fn parameters(model: &Decoder, dir: &Dir, name: &str) -> Vec<u8> {
        let record = model.clone().into_record();
        let name = format!("{name}.bpk");
        record.save(dir.path(&name)).expect("it can be written");
        dir.bytes(&name)
    }

    #[test]
    fn a_run_that_goes_on_while_texts_are_short_ends_as_one_that_was_never_ended() {
        let (dir, training, device) = (Dir::new(), training(), [Device::flex()]);
        let folder = dir.path("run");
        let mut steps = Vec::new();
        let mut see = |at: &flash_dma_models::Evaluated| {
            assert!(at.training_loss > 0.0 && at.validation_loss > 0.0);
            steps.push(at.step);
        };
        let whole = training.try_run(&text(), &folder, &device, &mut see);
        let whole = parameters(&whole.expect("it trains"), &dir, "whole");
        // As if the run had been interrupted: only the checkpoint after the third of four steps is left.
        std::fs::remove_file(folder.join("checkpoint/optim-4.bpk")).expect("the last checkpoint");
        let rest = training.try_resume(&text(), &folder, &device, &mut see);
        assert!(parameters(&rest.expect("it goes on"), &dir, "rest") == whole);
        assert_eq!(steps, [2, 4, 6, 8, 8]);

        let other = training
            .clone()
            .with_curriculum("0.25".parse().expect("a share"));
        let other = other.try_resume(&text(), &folder, &device, |_| {});
        assert_error!(
            other.expect_err("of another run"),
            TrainingError::Folder(FolderError::OtherSetting { .. })
        );
    }

    /// A step's texts on one device and on two, which take half of them each. The texts have documents that end in the
    /// middle of a row, so that the devices' shares of a mean differ.
    #[test]
    fn two_devices_share_the_texts_of_a_step() {
        let (dir, one, two) = (Dir::new(), vec![Device::flex()], vec![Device::flex(); 2]);
        let text: Vec<u8> = (0..9000u32).map(|at| (at * at % 251) as u8).collect();
        let training = training().with_batch(4).with_rate(3e-3);
        for activations in [Activations::Kept, Activations::Recomputed] {
            let mut training = training.clone();
            training.model.activations = activations;
            let run = |devices: &[Device], name: &str| {
                let mut losses = Vec::new();
                let see = |at: &flash_dma_models::Evaluated| {
                    losses.push([f64::from(at.training_loss), at.validation_loss]);
                };
                let model = training.try_run(&text, dir.path(name), devices, see);
                (numbers(&model.expect("it trains")), losses)
            };
            let (alone, losses) = run(&one, "one");
            let (shared, shared_losses) = run(&two, "two");
            assert_eq!(losses.len(), 4);
            for (one, two) in losses.iter().flatten().zip(shared_losses.iter().flatten()) {
                assert!((one - two).abs() < 1e-5 * one, "{one} and {two}");
            }
            // Steps are of 3e-3, and those of Adam hardly depend on the size of a gradient.
            assert_near(&alone, &shared);

            // A checkpoint of two devices continues on one.
            let folder = dir.path("two");
            std::fs::remove_file(folder.join("checkpoint/model-4.bpk")).expect("a checkpoint");
            let rest = training.try_resume(&text, &folder, &one, |_| {});
            assert_near(&alone, &numbers(&rest.expect("it goes on")));
        }
    }

    #[test]
    fn texts_in_parts_train_the_same() {
        let (dir, device) = (Dir::new(), [Device::flex()]);
        let text: Vec<u8> = (0..9000u32).map(|at| (at * at % 251) as u8).collect();
        let [whole, parts] = [None, Some(50)].map(|part| {
            let training = training().with_part(part);
            let model = training.try_run(&text, dir.path("run"), &device, |_| {});
            numbers(&model.expect("it trains"))
        });
        assert_near(&whole, &parts);
        // Its memory of a text has no bound.
        let mut training = training().with_part(Some(50));
        training.model.dense_layers = vec![1];
        training.model.local_window = None;
        let refused = training.try_run(&text, dir.path("run"), &device, |_| {});
        let refused = refused.expect_err("it is refused").to_string();
        assert!(refused.contains("keeps all keys"), "{refused}");
    }

    fn assert_near(left: &[f32], right: &[f32]) {
        assert_eq!(left.len(), right.len());
        let far = left.iter().zip(right).map(|(l, r)| (l - r).abs());
        let far = far.fold(0.0, f32::max);
        assert!(far < 1e-4, "off by {far}");
    }

    fn numbers(model: &Decoder) -> Vec<f32> {
        struct Numbers(Vec<f32>);
        impl ModuleVisitor for Numbers {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.extend(param.val().into_data().iter::<f32>());
            }
        }
        let mut numbers = Numbers(Vec::new());
        model.visit(&mut numbers);
        numbers.0
    }

    #[test]
    fn a_run_that_cannot_be_leaves_nothing() {
        let (training, device) = (training(), [Device::flex()]);
        let nowhere = Path::new("/nowhere/at/all");
        let error = |training: TextTraining, text: &[u8]| {
            let run = training.try_run(text, nowhere, &device, |_| {});
            run.expect_err("nothing to train")
        };
        assert_error!(
            error(training.clone().with_batch(0), &text()),
            TrainingError::Settings { .. }
        );
        assert_error!(
            error(training.clone().with_rate(f64::NAN), &text()),
            TrainingError::Settings { .. }
        );
        assert_error!(
            error(training.clone(), b"too little"),
            TrainingError::TooShort { needed: 1290, .. }
        );
        let devices = vec![Device::flex(); 3];
        for (devices, count) in [(&devices[..0], 0), (&devices, 3)] {
            let run = training.try_run(&text(), nowhere, devices, |_| {});
            assert_error!(
                run.expect_err("texts that cannot be shared"),
                TrainingError::Devices { devices, batch: 2 } if *devices == count
            );
        }
        let resumed = training.try_resume(&text(), Dir::new().path("new"), &device, |_| {});
        assert_error!(
            resumed.expect_err("no run"),
            TrainingError::NoCheckpoint { .. }
        );
    }
}

#[cfg(feature = "train")]
#[test]
fn the_metrics_say_what_the_layers_select_and_whether_the_scores_learn() {
    use burn::data::dataloader::Progress;
    use burn::train::metric::{Metric, MetricMetadata, Numeric};
    use burn_flash_dma::nn::Scores;
    use burn_flash_dma::train::{Measure, SelectionInput, SelectionMetric};

    let mut config = config();
    config.attention = config.attention.with_scores(Scores::Dma);
    let model = config.init(&Device::flex().autodiff());
    let [inputs, targets] = batch();
    let loss = model.try_loss_and_backward(inputs.clone(), targets.clone(), None);
    let (_, backward) = loss.expect("it fits");
    let gradients = model.score_gradients(&backward());
    let looked = model.valid().try_loss_and_selections(inputs, targets);
    let (_, selections) = looked.expect("it fits");
    let value = |measure: Measure, input: &SelectionInput| {
        let mut metric = SelectionMetric::new(measure);
        let metadata = MetricMetadata {
            progress: Progress::new(1, 1, None),
            iteration: None,
            lr: None,
        };
        metric.update(input, &metadata).expect("it can be read");
        metric.value().expect("a value").current()
    };
    assert!(value(Measure::ScoreGradient, &gradients) > 0.0);
    // Of 24 positions the first six see 1 to 6 keys, the others keep 6.
    assert!((value(Measure::KeysAlive, &selections) - 5.375).abs() < 1e-9);
    assert!((5.375..=24.0).contains(&value(Measure::Lifetime, &selections)));
    assert!((0.0..=100.0).contains(&value(Measure::Ties, &selections)));
}
