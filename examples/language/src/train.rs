//! One training: a model from its seed over all steps.

use crate::settings::Settings;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_dma::train::clip_gradients;
use serde::{Deserialize, Serialize};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use train_text::error::Error;
use train_text::model::TextModel;
use train_text::train::{MAX_NORM, optimiser};

/// Validations of a run after the first, which is before its first step.
const VALIDATIONS: usize = 10;

/// One step in so many warms up.
const WARM_UP_SHARE: usize = 20;

/// Texts of a step.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Bytes read, `[batch, tokens]`.
    pub inputs: Tensor<2, Int>,
    /// The byte behind each of them, `[batch, tokens]`.
    pub targets: Tensor<2, Int>,
    /// 1 where the target is part of an answer, else 0, `[batch, tokens]`; `None` without answers.
    pub answers: Option<Tensor<2>>,
}

/// What a model is trained on.
pub trait Lessons {
    /// The batch of a step, of `size` texts: the same for every arm.
    fn batch(&self, seed: u64, step: usize, size: usize, device: &Device) -> Batch;

    /// What to validate with during training, of `size` texts at a time: the same for every run.
    fn validation(&self, size: usize, device: &Device) -> Vec<Batch>;
}

/// A place on a run's curve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Steps done.
    pub step: usize,
    /// The training loss in the mean over the steps since the last point, weights included, in nats; `None` at the
    /// first.
    pub training_loss: Option<f64>,
    /// Cross-entropy of the validation texts of a training, in nats a byte.
    pub validation_loss: f64,
    /// The same of the answers' bytes alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_loss: Option<f64>,
    /// Seconds since the beginning.
    pub seconds: f64,
}

/// A finished training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Training {
    /// Trained numbers in the model.
    pub parameters: usize,
    /// A step, in the mean without those before the first validation; `None` if there were no others.
    pub step_milliseconds: Option<f64>,
    /// Bytes that the device's allocator has reserved at the end, if it tells. It gives nothing back, so only the first
    /// run of a process says what a training needs.
    pub reserved_bytes: Option<u64>,
    /// The validations.
    pub curve: Vec<Point>,
}

/// Texts of equal length as a batch without answers; of each the last byte is a target only.
///
/// # Panics
///
/// If there are none.
pub fn batch_of(texts: &[&[u8]], device: &Device) -> Batch {
    let tokens = texts[0].len() - 1;
    Batch {
        inputs: bytes(texts.iter().map(|text| &text[..tokens]), device),
        targets: bytes(texts.iter().map(|text| &text[1..]), device),
        answers: None,
    }
}

/// Texts of equal length as a tensor, `[texts, len]`.
pub fn bytes<'a>(texts: impl Iterator<Item = &'a [u8]>, device: &Device) -> Tensor<2, Int> {
    let (mut numbers, mut count) = (Vec::new(), 0);
    for text in texts {
        count += 1;
        numbers.extend(text.iter().map(|&byte| i32::from(byte)));
    }
    let shape = [count, numbers.len() / count.max(1)];
    Tensor::from_data(TensorData::new(numbers, shape), device)
}

/// Trains a model. `see` gets every point of the curve as it is made, validated with the window of the step before. The
/// model returned is without autodiff.
///
/// # Errors
///
/// [`Error::Training`] if a loss is not finite, or the device fails.
pub fn train(
    settings: &Settings,
    lessons: &impl Lessons,
    device: &Device,
    mut see: impl FnMut(&Point),
) -> Result<(TextModel, Training), Error> {
    let start = Instant::now();
    let Settings {
        steps, batch, seed, ..
    } = *settings;
    let validation = lessons.validation(batch, device);
    let with_autodiff = device.clone().autodiff();
    let mut model = drawn(settings, &with_autodiff)?;
    let mut window = settings.window;
    let parameters = model.num_params();
    let mut optimiser = optimiser();
    let every = steps.div_ceil(VALIDATIONS);
    let mut curve: Vec<Point> = Vec::new();
    let (mut seconds, mut timed) = (0.0, 0);
    let (mut begun, mut step) = (Instant::now(), 0usize);
    // Summed on the device: reading the loss of each step would make the device wait for the host.
    let mut sum: Option<Tensor<1>> = None;
    loop {
        if step.is_multiple_of(every) || step == steps {
            let done = step - curve.last().map_or(0, |point| point.step);
            let training_loss = sum.take().map(|sum| scalar(sum) / done as f64);
            // The device has nothing left to do now, so the time is that of the steps.
            if curve.last().is_some_and(|before| before.step > 0) {
                seconds += begun.elapsed().as_secs_f64();
                timed += done;
            }
            let [validation_loss, answer_loss] = validate(&model.valid(), &validation);
            let point = Point {
                step,
                training_loss,
                validation_loss: finite(validation_loss, "validation loss")?,
                answer_loss: (validation[0].answers.is_some()).then_some(answer_loss),
                seconds: start.elapsed().as_secs_f64(),
            };
            see(&point);
            curve.push(point);
            begun = Instant::now();
        }
        if step == steps {
            break;
        }
        if settings.window_at(step) != window {
            window = settings.window_at(step);
            model = with_window(model, settings, window, &with_autodiff);
        }
        let Batch {
            inputs,
            targets,
            answers,
        } = lessons.batch(seed, step, batch, device);
        let weights = answers.map(|answers| {
            let weights = answers * (settings.answer_weight - 1.0) + 1.0;
            let mean = weights.clone().mean().reshape([1, 1]);
            (weights / mean).autodiff()
        });
        let (inputs, targets) = (inputs.autodiff(), targets.autodiff());
        let (loss, backward) = model.weighted_loss_and_backward(inputs, targets, weights);
        let mut gradients = backward();
        let loss = loss.without_autodiff();
        sum = Some(match sum {
            Some(sum) => sum + loss,
            None => loss,
        });
        clip_gradients(&model, &mut gradients, MAX_NORM);
        model = optimiser.step(rate(settings, step), model, gradients);
        step += 1;
        device.flush().map_err(stopped)?;
    }
    let training = Training {
        parameters,
        step_milliseconds: (timed > 0).then(|| 1e3 * seconds / timed as f64),
        reserved_bytes: device.memory_pool_usage().map(|usage| usage.bytes_reserved),
        curve,
    };
    Ok((model.valid(), training))
}

/// The model with its parameters, which stay those that an optimiser knows, and another window. It is made anew,
/// since recent keys go with the window: all of it in a sliding layer.
pub fn with_window(
    model: TextModel,
    settings: &Settings,
    window: Option<usize>,
    device: &Device,
) -> TextModel {
    let settings = Settings {
        window,
        ..settings.clone()
    };
    settings
        .model()
        .init(device)
        .load_record(model.into_record())
}

/// The model of a seed, all of its parameters drawn in their order. Threads share the random numbers of their device:
/// one model is drawn at a time.
///
/// # Errors
///
/// [`Error::Training`] if the device fails.
pub fn drawn(settings: &Settings, device: &Device) -> Result<TextModel, Error> {
    static DRAWING: Mutex<()> = Mutex::new(());
    let _alone = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(settings.seed);
    let model = settings.model().init(device);
    model.visit(&mut Draw);
    // Some are drawn when the device comes to it.
    device.sync().map_err(stopped)?;
    Ok(model)
}

/// Draws every parameter. Burn draws one when it is first read, so the order, and with it the numbers, would depend on
/// what an arm reads.
struct Draw;

impl ModuleVisitor for Draw {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let _ = param.val();
    }
}

/// The learning rate of a step: a linear rise, then a cosine down to 0.
fn rate(settings: &Settings, step: usize) -> f64 {
    let warm_up = settings.steps.div_ceil(WARM_UP_SHARE);
    let rise = ((step + 1) as f64 / warm_up as f64).min(1.0);
    let done = step as f64 / settings.steps as f64;
    settings.rate * rise * (1.0 + (std::f64::consts::PI * done).cos()) / 2.0
}

/// The mean loss of all bytes and of the answers' bytes.
fn validate(model: &TextModel, batches: &[Batch]) -> [f64; 2] {
    let texts = |batch: &Batch| batch.inputs.dims()[0] as f64;
    let all: f64 = batches.iter().map(texts).sum();
    let mut means = [0.0; 2];
    for batch in batches {
        let share = texts(batch) / all;
        let losses = model.token_losses(batch.inputs.clone(), batch.targets.clone());
        means[0] += share * scalar(losses.clone().mean());
        if let Some(answers) = &batch.answers {
            let mean = (losses * answers.clone()).sum() / answers.clone().sum();
            means[1] += share * scalar(mean);
        }
    }
    means
}

fn scalar(tensor: Tensor<1>) -> f64 {
    f64::from(tensor.into_scalar::<f32>())
}

/// A number that a row can hold.
///
/// # Errors
///
/// [`Error::Training`] if it is infinite or no number.
pub fn finite(number: f64, what: &str) -> Result<f64, Error> {
    match number.is_finite() {
        true => Ok(number),
        false => Err(Error::Training(format!("the {what} is {number}"))),
    }
}

fn stopped(error: impl std::fmt::Debug) -> Error {
    Error::Training(format!("{error:?}"))
}
