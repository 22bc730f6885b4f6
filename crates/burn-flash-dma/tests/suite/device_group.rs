//! Sequences of which each device of a group has a part: a step that fails ends on all of them.

use burn::module::{Module, Param};
use burn::tensor::{Device, Distribution, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Selection};
use burn_flash_dma::train::{DeviceGroup, PartLayers, Parts, StepInParts, send};
use std::ops::Range;
use std::time::{Duration, Instant};

#[derive(Module, Debug)]
struct Model {
    scale: Param<Tensor<1>>,
    blocks: Vec<DynamicMaskAttention>,
}

/// Fault of a device.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    PanicsInFront,
    PanicsBetweenBlocks,
    PanicsInLoss,
    Fails,
    Sleeps,
    CallsNoLayer,
}

#[derive(Clone)]
struct Step {
    x: Tensor<3>,
    fault: Fault,
    /// First token of the part at fault.
    at: usize,
}

impl Step {
    fn fails(&self, tokens: &Range<usize>, fault: Fault) -> bool {
        self.fault == fault && self.at == tokens.start
    }
}

impl StepInParts<Model> for Step {
    type Block = DynamicMaskAttention;

    fn to_device(&self, device: &Device) -> Self {
        let x = send(self.x.clone(), device);
        Self { x, ..*self }
    }

    fn input(&self, model: &Model, tokens: Range<usize>) -> Result<Tensor<3>, AttentionError> {
        assert!(!self.fails(&tokens, Fault::PanicsInFront), "in front");
        if self.fails(&tokens, Fault::Fails) {
            let what = "this part".to_owned();
            return Err(AttentionError::Unsupported { what });
        }
        if self.fails(&tokens, Fault::Sleeps) {
            std::thread::sleep(Duration::from_secs(60));
        }
        let x = self.x.clone().narrow(1, tokens.start, tokens.len());
        Ok(x.autodiff() * model.scale.val().unsqueeze())
    }

    fn blocks<'a>(&self, model: &'a Model) -> &'a [DynamicMaskAttention] {
        &model.blocks
    }

    fn block(
        &self,
        block: &DynamicMaskAttention,
        x: Tensor<3>,
        layers: &mut PartLayers,
    ) -> Result<Tensor<3>, AttentionError> {
        if self.fault == Fault::CallsNoLayer {
            return Ok(x);
        }
        let out = layers.try_attend(block, x.clone())?;
        // The part in front has no token of its own to tell it by, so the length does.
        let [_, len, _] = x.dims();
        let is_second = len == 7;
        assert!(
            !(is_second && self.fault == Fault::PanicsBetweenBlocks),
            "between blocks"
        );
        Ok(x + out)
    }

    fn loss(
        &self,
        _: &Model,
        tokens: Range<usize>,
        x: Tensor<3>,
    ) -> Result<Tensor<1>, AttentionError> {
        assert!(!self.fails(&tokens, Fault::PanicsInLoss), "in the loss");
        Ok(x.powi_scalar(2).sum())
    }
}

fn model() -> Model {
    let device = Device::flex().autodiff();
    let layer = || {
        DynamicMaskAttentionConfig::new(16, 2)
            .with_selection(Selection::keep(6))
            .init(&device)
    };
    Model {
        scale: Param::from_tensor(Tensor::from_floats([1.0], &device)),
        blocks: vec![layer(), layer()],
    }
}

fn group() -> DeviceGroup {
    DeviceGroup::try_new(&vec![Device::flex(); 3]).expect("one device, three times")
}

fn step(fault: Fault, at: usize) -> Step {
    let x = Tensor::random([2, 20, 16], Distribution::Default, &Device::flex());
    Step { x, fault, at }
}

/// Parts of 8, 7 and 5 tokens.
fn parts() -> Parts {
    Parts::of_lengths(2, &[8, 7, 5])
}

/// Each device at fault, in each way: all others stop, the error says which it was, and the group goes on with the next step.
#[test]
fn a_device_that_fails_ends_the_step_on_all() {
    let (model, mut group) = (model(), group());
    for (place, at) in [(0, 0), (1, 8), (2, 15)] {
        for (fault, text) in [
            (Fault::PanicsInFront, "panicked: in front"),
            (Fault::PanicsInLoss, "panicked: in the loss"),
        ] {
            let begin = Instant::now();
            let failed = group.try_gradients(&model, &parts(), &step(fault, at));
            let failed = failed.map(drop).expect_err("a device panics").to_string();
            assert_eq!(failed, format!("device {place} of the group {text}"));
            // Long before the time is over.
            assert!(begin.elapsed() < Duration::from_secs(60));
        }
        let failed = group.try_gradients(&model, &parts(), &step(Fault::Fails, at));
        let failed = failed.map(drop).expect_err("a part fails").to_string();
        assert_eq!(failed, "the device does not support this part");
    }
    let failed = group.try_gradients(&model, &parts(), &step(Fault::PanicsBetweenBlocks, 8));
    let failed = failed.map(drop).expect_err("a device panics").to_string();
    assert_eq!(failed, "device 1 of the group panicked: between blocks");
    let failed = group.try_gradients(&model, &parts(), &step(Fault::CallsNoLayer, 0));
    let failed = failed
        .map(drop)
        .expect_err("no layer is called")
        .to_string();
    assert!(
        failed.contains("attention layers up to block 0"),
        "{failed}"
    );

    let (loss, gradients) = group
        .try_gradients(&model, &parts(), &step(Fault::None, 0))
        .expect("it goes on");
    assert!(loss.into_scalar::<f32>().is_finite());
    assert!(gradients.get::<1>(model.scale.id).is_some());
}

#[test]
fn a_device_that_does_not_answer_is_given_up() {
    let model = model();
    for at in [0, 8, 15] {
        let mut group = group().with_timeout(Duration::from_millis(500));
        let begin = Instant::now();
        let lost = group.try_gradients(&model, &parts(), &step(Fault::Sleeps, at));
        let lost = lost.map(drop).expect_err("a device sleeps").to_string();
        assert!(lost.ends_with("did not answer within 0.5 s"), "{lost}");
        // Long before it answers, on a busy machine as well.
        assert!(begin.elapsed() < Duration::from_secs(30));
        // Its thread may be busy for ever.
        let later = group.try_gradients(&model, &parts(), &step(Fault::None, 0));
        let later = later.map(drop).expect_err("a device is lost").to_string();
        assert_eq!(later, lost);
    }
}

#[test]
fn parts_are_as_many_as_devices() {
    let mut group = group();
    let refused = group.try_gradients(&model(), &Parts::new(2, 20, 10), &step(Fault::None, 0));
    let refused = refused.map(drop).expect_err("two parts").to_string();
    assert_eq!(refused, "the device does not support 2 parts on 3 devices");
    assert!(DeviceGroup::try_new(&[]).is_err());
}

/// Parts of any lengths, on one device and on several.
#[test]
fn the_gradient_does_not_depend_on_the_parts() {
    let (model, step) = (model(), step(Fault::None, 0));
    let numbers = |lengths: &[usize]| {
        let mut group = DeviceGroup::try_new(&vec![Device::flex(); lengths.len()]).expect("flex");
        let (loss, gradients) = group
            .try_gradients(&model, &Parts::of_lengths(2, lengths), &step)
            .expect("it fits");
        let mut numbers = vec![loss.into_scalar::<f32>()];
        let scale = gradients.get::<1>(model.scale.id).expect("it learns");
        numbers.extend(scale.into_data().iter::<f32>());
        for block in &model.blocks {
            let weight = gradients.get::<2>(block.k_proj.weight.id);
            numbers.extend(weight.expect("it learns").into_data().iter::<f32>());
        }
        numbers
    };
    let whole = numbers(&[20]);
    let most = whole.iter().fold(0f32, |most, x| most.max(x.abs()));
    for lengths in [&[8, 7, 5][..], &[1, 19], &[1, 1, 1, 17], &[10, 10]] {
        let far = whole
            .iter()
            .zip(numbers(lengths))
            .map(|(a, b)| (a - b).abs());
        let far = far.fold(0f32, f32::max);
        assert!(
            far < 2e-6 * most,
            "parts of {lengths:?}: off by {far} of {most}"
        );
    }
}
