//! Training from a text: runs that go on, on several devices, in parts. A device has one stream of random numbers for all threads, so
//! these are a program of their own, and one run at a time.
#![cfg(all(feature = "flex", feature = "train"))]

#[macro_use]
#[path = "it/assert.rs"]
mod assert;
#[expect(dead_code, reason = "the other program writes files, too")]
#[path = "it/dir.rs"]
mod dir;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Selection};
use dir::Dir;
use flash_dma_models::nn::{Activations, Decoder, DecoderConfig};
use flash_dma_models::{FolderError, Reading, TextTraining, TrainingError};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

fn alone() -> MutexGuard<'static, ()> {
    static RUN: Mutex<()> = Mutex::new(());
    RUN.lock().unwrap_or_else(PoisonError::into_inner)
}

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

/// A text that does not repeat soon.
fn squares() -> Vec<u8> {
    (0..9000u32).map(|at| (at * at % 251) as u8).collect()
}

fn parameters(model: &Decoder, dir: &Dir, name: &str) -> Vec<u8> {
    let record = model.clone().into_record();
    let name = format!("{name}.bpk");
    record.save(dir.path(&name)).expect("it can be written");
    dir.bytes(&name)
}

#[test]
fn a_run_that_goes_on_while_texts_are_short_ends_as_one_that_was_never_ended() {
    let _alone = alone();
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
    let _alone = alone();
    let (dir, one, two) = (Dir::new(), vec![Device::flex()], vec![Device::flex(); 2]);
    let text = squares();
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
    let _alone = alone();
    let (dir, device) = (Dir::new(), [Device::flex()]);
    let text = squares();
    let [whole, parts] = [Reading::Whole, Reading::InParts(50)].map(|reading| {
        let training = training().with_reading(reading);
        let model = training.try_run(&text, dir.path("run"), &device, |_| {});
        numbers(&model.expect("it trains"))
    });
    assert_near(&whole, &parts);
    // Its memory of a text has no bound.
    let mut training = training().with_reading(Reading::InParts(50));
    training.model.dense_layers = vec![1];
    training.model.local_window = None;
    let refused = training.try_run(&text, dir.path("run"), &device, |_| {});
    let refused = refused.expect_err("it is refused").to_string();
    assert!(refused.contains("keeps all keys"), "{refused}");
}

/// Three devices, which have as many bytes of a text each; its first steps are of texts that are shorter.
#[test]
fn devices_that_have_a_part_of_every_text_train_the_same() {
    let _alone = alone();
    let dir = Dir::new();
    let text = squares();
    let [whole, over] = [(Reading::Whole, 1), (Reading::OverDevices, 3)].map(|(reading, count)| {
        let (training, devices) = (
            training().with_reading(reading),
            vec![Device::flex(); count],
        );
        let model = training.try_run(&text, dir.path("run"), &devices, |_| {});
        numbers(&model.expect("it trains"))
    });
    assert_near(&whole, &over);
    let devices = vec![Device::flex(); 65];
    let refused = training().with_reading(Reading::OverDevices).try_run(
        &text,
        dir.path("run"),
        &devices,
        |_| {},
    );
    assert_error!(
        refused.expect_err("a text is shorter"),
        TrainingError::Parts { devices: 65, .. }
    );
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
