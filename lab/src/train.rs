//! One run: a model trained from its seed until it has learned its task, its curve is flat, or its steps are used up,
//! and then evaluated.

use crate::Result;
use crate::device::name;
use crate::layers::LayerStatistics;
use crate::recall::Recall;
use crate::settings::{Settings, Task};
use crate::text::Language;
use crate::text::answers::Answers;
use crate::text::corpus::Corpus;
use crate::text::losses::{Losses, WindowLosses};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::Scorer;
use burn_flash_dma::train::{AdamWConfig, clip_gradients};
use flash_dma_models::nn::DecoderBlock;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Evaluations of a run that uses up its steps, after the first, which is before its first step.
const EVALUATIONS: usize = 20;

/// One step in this many warms up.
const WARM_UP_SHARE: usize = 20;

/// Maximum global norm of the gradients.
const MAX_NORM: f64 = 1.0;

/// A model that twice in a row answers this share of the questions has learned the task.
const SOLVED: f64 = 0.999;

/// A curve that rises by less in half of all steps is flat.
const RISE: f64 = 0.01;

/// Model, data and evaluation of a run.
pub trait Subject {
    /// The trained model.
    type Model: Module;

    /// A model with random parameters.
    fn model(&self, device: &Device) -> Result<Self::Model>;

    /// The model with another window and the same parameters (identity included, for the optimiser).
    fn with_window(&self, model: Self::Model, window: Option<usize>) -> Result<Self::Model>;

    /// The blocks of a model.
    fn blocks(model: &Self::Model) -> &[DecoderBlock];

    /// Loss of a training step, counted from 0, and the gradients of all parameters.
    fn gradients(&self, model: &Self::Model, step: usize) -> Result<(Tensor<1>, GradientsParams)>;

    /// Watched values of a model without autodiff.
    fn watch(&self, model: &Self::Model) -> Result<Watched>;

    /// The evaluation of a trained model without autodiff.
    fn evaluate(&self, model: &Self::Model) -> Result<Evaluation>;
}

/// Reason for the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stop {
    /// Two evaluations in a row answered 99.9 % of the questions of recall.
    Solved,
    /// No evaluation in the last half of all steps answered 0.01 more of them than the best before.
    Flat,
    /// All steps are done.
    Steps,
}

/// Values watched during training.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Watched {
    /// See [`Evaluation::accuracy`].
    pub accuracy: Option<f64>,
    /// See [`Evaluation::kept`].
    pub kept: Option<f64>,
    /// Recall only: standard deviation of each layer's scores; empty for an arm without scores.
    pub spreads: Vec<f64>,
    /// Text and needles only: cross-entropy of the validation texts of a training, in nats per byte.
    pub validation_loss: Option<f64>,
    /// Needles only: cross-entropy of the answers' bytes alone.
    pub answer_loss: Option<f64>,
}

/// A point of a run's curve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Steps done.
    pub step: usize,
    /// Seconds since the beginning.
    pub seconds: f64,
    /// Mean training loss over the steps since the last point, weights included, in nats; `None` at the first, or if
    /// it is not finite.
    pub training_loss: Option<f64>,
    /// Euclidean norm of the gradients of all scores' parameters in the next step, before clipping; `None` if it is
    /// not finite.
    pub score_gradient: Option<f64>,
    /// Watched values, with the narrowing window.
    #[serde(flatten)]
    pub watched: Watched,
}

/// A finished training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Training {
    /// Number of trained parameters.
    pub parameters: usize,
    /// Steps done.
    pub steps_done: usize,
    /// Reason for its end.
    pub stopped: Stop,
    /// Mean time of a step, without those before the first point; `None` if there were no others.
    pub step_milliseconds: Option<f64>,
    /// Bytes that the device's allocator has reserved at the end, if it reports them. It gives nothing back, so only
    /// the first run of a process shows what a training needs.
    pub reserved_bytes: Option<u64>,
    /// The points.
    pub curve: Vec<Point>,
}

/// Evaluation of a trained model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Recall only: share of right answers to the questions of texts that training never draws.
    pub accuracy: Option<f64>,
    /// Recall only: share of questions whose fact some kv head of some layer keeps until it is asked for.
    pub kept: Option<f64>,
    /// Selection of each layer; `None` for a layer that attends to all keys.
    pub by_layer: Vec<Option<LayerStatistics>>,
    /// Text only: losses at the training length, and at four times it, on the same bytes.
    pub losses: Vec<Losses>,
    /// Text only: losses at the training length with other windows than the training's, in their order.
    pub losses_by_window: Vec<WindowLosses>,
    /// Needles only: the answers.
    pub answers: Option<Answers>,
}

/// A finished run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The training.
    #[serde(flatten)]
    pub training: Training,
    /// The evaluation.
    #[serde(flatten)]
    pub evaluation: Evaluation,
    /// Total time, including compilation and evaluations.
    pub seconds: f64,
}

/// Makes a run; `see` gets every point of its curve. The corpus is for text and needles, and the folder for the
/// parameters of the trained model.
pub fn run(
    settings: &Settings,
    corpus: Option<&Corpus>,
    device: &Device,
    folder: Option<&Path>,
    see: impl FnMut(&Point),
) -> Result<Outcome> {
    match settings.task {
        Task::Recall => {
            let recall = Recall::new(settings, device);
            run_subject(&recall, settings, device, folder, see)
        }
        Task::Text | Task::Needles => {
            let corpus = corpus.expect("the task has a corpus");
            let language = Language::new(corpus, settings, device)?;
            run_subject(&language, settings, device, folder, see)
        }
    }
}

fn run_subject<S: Subject>(
    subject: &S,
    settings: &Settings,
    device: &Device,
    folder: Option<&Path>,
    see: impl FnMut(&Point),
) -> Result<Outcome> {
    let start = Instant::now();
    let (model, training) = train(subject, settings, device, see)?;
    let outcome = Outcome {
        training,
        evaluation: subject.evaluate(&model)?,
        seconds: start.elapsed().as_secs_f64(),
    };
    if let Some(folder) = folder {
        let task = format!("{:?}", settings.task).to_lowercase();
        let (arm, tokens, seed) = (name(settings.arm), settings.tokens, settings.seed);
        let path = folder.join(format!("{task}-{arm}-{tokens}-{seed}.bpk"));
        let saved = model.into_record().save(&path);
        saved.map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(outcome)
}

/// Trains a model. Returns it without autodiff.
fn train<S: Subject>(
    subject: &S,
    settings: &Settings,
    device: &Device,
    mut see: impl FnMut(&Point),
) -> Result<(S::Model, Training)> {
    let start = Instant::now();
    let with_autodiff = device.clone().autodiff();
    let draw = |device: &Device| subject.model(device);
    let mut model = drawn(settings.seed, &with_autodiff, draw)?;
    let mut window = settings.window;
    let mut narrow = |model, to| match std::mem::replace(&mut window, to) == to {
        true => Ok(model),
        false => subject.with_window(model, to),
    };
    let optimiser = AdamWConfig::new()
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.01);
    let mut optimiser = optimiser.init();
    let every = settings.steps.div_ceil(EVALUATIONS);
    let mut curve: Vec<Point> = Vec::new();
    let (mut seconds, mut timed) = (0.0, 0);
    let (mut begun, mut step) = (Instant::now(), 0);
    // Summed on the device: reading the loss of each step would make the device wait for the host.
    let mut sum: Option<Tensor<1>> = None;
    let stopped = loop {
        model = narrow(model, settings.step(step).window)?;
        let (loss, mut gradients) = subject.gradients(&model, step)?;
        let last = step == settings.steps;
        if step.is_multiple_of(every) || last {
            let done = step - curve.last().map_or(0, |point| point.step);
            let training_loss = sum.take().map(|sum| scalar(sum) / done as f64);
            let score_gradient = score_gradient(S::blocks(&model), &gradients);
            // The device is idle now, so the time is that of the steps.
            if curve.last().is_some_and(|before| before.step > 0) {
                seconds += begun.elapsed().as_secs_f64();
                timed += done;
            }
            model = narrow(model, settings.window_at(step))?;
            let point = Point {
                step,
                training_loss: training_loss.filter(|loss| loss.is_finite()),
                score_gradient: Some(score_gradient).filter(|norm| norm.is_finite()),
                watched: subject.watch(&model.valid())?,
                seconds: start.elapsed().as_secs_f64(),
            };
            see(&point);
            curve.push(point);
            if let Some(stopped) = stopped(&curve, settings).or(last.then_some(Stop::Steps)) {
                break stopped;
            }
            begun = Instant::now();
        }
        let loss = loss.without_autodiff();
        sum = Some(added(sum, loss));
        clip_gradients(&model, &mut gradients, MAX_NORM);
        model = optimiser.step(rate(settings, step), model, gradients);
        step += 1;
        device.flush().map_err(|error| format!("{error:?}"))?;
    };
    let training = Training {
        parameters: model.num_params(),
        steps_done: step,
        stopped,
        step_milliseconds: (timed > 0).then(|| 1e3 * seconds / timed as f64),
        reserved_bytes: device.memory_pool_usage().map(|usage| usage.bytes_reserved),
        curve,
    };
    Ok((model.valid(), training))
}

/// The model of a seed, with all of its parameters drawn in order. Threads share the random numbers of their device:
/// one model is drawn at a time.
pub fn drawn<M: Module>(
    seed: u64,
    device: &Device,
    model: impl FnOnce(&Device) -> Result<M>,
) -> Result<M> {
    static DRAWING: Mutex<()> = Mutex::new(());
    let _alone = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(seed);
    let model = model(device)?;
    model.visit(&mut Draw);
    // Some are drawn only when the device comes to it.
    device.sync().map_err(|error| format!("{error:?}"))?;
    Ok(model)
}

/// Draws every parameter. Burn draws one on first use, so the order, and with it the numbers, would depend on what an
/// arm reads.
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

/// Reason to stop, if a curve of answers needs no further steps; results with a wider window or from shorter texts do
/// not count.
fn stopped(curve: &[Point], settings: &Settings) -> Option<Stop> {
    let is_easier = |point: &&Point| settings.is_easier(point.step);
    let counted = curve.iter().skip_while(is_easier);
    let answered = counted.filter_map(|point| Some((point.step, point.watched.accuracy?)));
    let answered: Vec<(usize, f64)> = answered.collect();
    let [.., (_, before), (last, now)] = answered[..] else {
        return None;
    };
    if before >= SOLVED && now >= SOLVED {
        return Some(Stop::Solved);
    }
    let half = settings.steps.div_ceil(2);
    let best = |of_old: bool| {
        let points = answered.iter();
        let points = points.filter(|(step, _)| (step + half <= last) == of_old);
        points.fold(f64::NEG_INFINITY, |best, &(_, share)| best.max(share))
    };
    let (old, new) = (best(true), best(false));
    (old > f64::NEG_INFINITY && new < old + RISE).then_some(Stop::Flat)
}

/// Norm of the gradients of all scores' parameters; 0 if there are none.
fn score_gradient(blocks: &[DecoderBlock], gradients: &GradientsParams) -> f64 {
    let norm = |square: Option<Tensor<1>>| square.map_or(0.0, scalar);
    let square = |gradient: Tensor<2>| gradient.square().sum();
    let of_layer = |scorer: &Scorer| match scorer {
        Scorer::Linear(linear) => norm(gradients.get::<2>(linear.score_proj.id).map(square)),
        Scorer::Zoh(zoh) => {
            let a = gradients.get::<1>(zoh.a.id);
            norm(gradients.get::<2>(zoh.dt_proj.id).map(square)) + norm(a.map(|a| a.square().sum()))
        }
    };
    let layers = blocks.iter().map(|block| block.attention.scorer());
    layers.map(of_layer).sum::<f64>().sqrt()
}

/// A sum with one more summand.
pub fn added(sum: Option<Tensor<1>>, summand: Tensor<1>) -> Tensor<1> {
    match sum {
        Some(sum) => sum + summand,
        None => summand,
    }
}

/// The number in a tensor of one element.
pub fn scalar(tensor: Tensor<1>) -> f64 {
    f64::from(tensor.into_scalar::<f32>())
}

/// A number that a row can hold.
pub fn finite(number: f64, what: &str) -> Result<f64> {
    match number.is_finite() {
        true => Ok(number),
        false => Err(format!("the {what} is {number}").into()),
    }
}
