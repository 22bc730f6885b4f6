//! One run: a model trained from its seed until it has learned the task, its curve is flat, or its steps are used up.

use crate::evaluate::{Evaluation, batches, evaluate};
use crate::model::Model;
use crate::settings::Settings;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::nn::Scorer;
use burn_flash_dma::train::{clip_gradients, cross_entropy};
use serde::{Deserialize, Serialize};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use train_text::train::{MAX_NORM, optimiser};

/// Evaluations of a run that uses up its steps.
const EVALUATIONS: usize = 20;

/// One step in so many warms up.
const WARM_UP_SHARE: usize = 20;

/// A model that twice in a row answers this share of the questions has learned the task.
const SOLVED: f64 = 0.999;

/// A curve that rises by less in half of all steps is flat.
const RISE: f64 = 0.01;

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stop {
    /// Two evaluations in a row answered 99.9 % of the questions.
    Solved,
    /// No evaluation in the last half of all steps was 0.01 better than the best before.
    Flat,
    /// All steps are done.
    Steps,
}

/// A place on a run's curve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Steps done.
    pub step: usize,
    /// Cross-entropy of the next step's questions, in nats; `None` if it is not finite.
    pub loss: Option<f64>,
    /// As [`Evaluation::accuracy`].
    pub accuracy: f64,
    /// As [`Evaluation::kept`].
    pub kept: f64,
    /// The Euclidean norm of the gradients of all scores' parameters in the next step, before clipping; `None` if it is
    /// not finite.
    pub score_gradient: Option<f64>,
    /// The standard deviation of each layer's scores; empty for an arm without scores, and in old rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spreads: Vec<f64>,
}

/// A finished run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Trained numbers in the model.
    pub parameters: usize,
    /// The last evaluation.
    #[serde(flatten)]
    pub last: Evaluation,
    /// Steps done.
    pub steps_done: usize,
    /// Why it ended.
    pub stopped: Stop,
    /// Everything, compilation and evaluations included.
    pub seconds: f64,
    /// A training step, in the mean without the first twentieth of all steps; `None` if there were no others.
    pub step_milliseconds: Option<f64>,
    /// The evaluations.
    pub curve: Vec<Point>,
}

/// Trains a model. `see` gets every evaluation as it is made.
///
/// # Errors
///
/// [`AttentionError`] if the sizes are refused or the device fails.
pub fn train(
    settings: &Settings,
    device: &Device,
    mut see: impl FnMut(&Point),
) -> Result<Outcome, AttentionError> {
    let start = Instant::now();
    let evaluated = batches(settings, device);
    let device = device.clone().autodiff();
    let mut model = drawn(settings, &device)?;
    let mut optimiser = optimiser();
    let every = settings.steps.div_ceil(EVALUATIONS);
    let mut curve: Vec<Point> = Vec::new();
    let (mut seconds, mut timed) = (0.0, 0);
    let (mut begun, mut step) = (Instant::now(), 0);
    loop {
        let trained = settings.step(step);
        model.set_window(trained.window);
        let batch = (trained.task).batch(trained.batch, settings.seed, step, &device);
        let loss = cross_entropy(model.forward(&batch)?, batch.answers.clone());
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        let last = step == settings.steps;
        if step.is_multiple_of(every) || last {
            let loss = Some(f64::from(loss.into_scalar::<f32>())).filter(|loss| loss.is_finite());
            let score_gradient = score_gradient(&model, &gradients);
            let score_gradient = Some(score_gradient).filter(|norm| norm.is_finite());
            // The device has nothing left to do now, so the time is that of the steps.
            if let Some(before) = curve.last().filter(|before| before.step > 0) {
                seconds += begun.elapsed().as_secs_f64();
                timed += step - before.step;
            }
            model.set_window(settings.window_at(step));
            let evaluation = evaluate(&model, &evaluated)?;
            let point = Point {
                step,
                loss,
                accuracy: evaluation.accuracy,
                kept: evaluation.kept,
                score_gradient,
                spreads: (evaluation.by_layer.iter())
                    .filter_map(|layer| layer.spread.filter(|spread| spread.is_finite()))
                    .collect(),
            };
            see(&point);
            curve.push(point);
            let stopped = stopped(&curve, settings).or(last.then_some(Stop::Steps));
            if let Some(stopped) = stopped {
                return Ok(Outcome {
                    parameters: model.num_params(),
                    last: evaluation,
                    steps_done: step,
                    stopped,
                    seconds: start.elapsed().as_secs_f64(),
                    step_milliseconds: (timed > 0).then(|| 1e3 * seconds / timed as f64),
                    curve,
                });
            }
            begun = Instant::now();
        }
        clip_gradients(&model, &mut gradients, MAX_NORM);
        model = optimiser.step(rate(settings, step), model, gradients);
        step += 1;
    }
}

/// The model of a seed. Threads share the random numbers of their device: one model is drawn at a time.
fn drawn(settings: &Settings, device: &Device) -> Result<Model, AttentionError> {
    static DRAWING: Mutex<()> = Mutex::new(());
    let _alone = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(settings.seed);
    let model = Model::new(settings, device);
    // Some are drawn when the device comes to it.
    let failed = |error| AttentionError::DeviceFailed {
        operation: "the drawing of a model",
        reason: format!("{error:?}"),
    };
    device.sync().map_err(failed)?;
    Ok(model)
}

/// The learning rate of a step: a linear rise, then a cosine down to 0.
fn rate(settings: &Settings, step: usize) -> f64 {
    let warm_up = settings.steps.div_ceil(WARM_UP_SHARE);
    let rise = ((step + 1) as f64 / warm_up as f64).min(1.0);
    let done = step as f64 / settings.steps as f64;
    settings.rate * rise * (1.0 + (std::f64::consts::PI * done).cos()) / 2.0
}

/// Whether a curve needs no further steps.
fn stopped(curve: &[Point], settings: &Settings) -> Option<Stop> {
    // What was reached with a wider window or from shorter texts does not count.
    let easier = |point: &&Point| settings.is_easier(point.step);
    let (curve, steps) = (
        &curve[curve.iter().take_while(easier).count()..],
        settings.steps,
    );
    let [.., before, last] = curve else {
        return None;
    };
    if before.accuracy >= SOLVED && last.accuracy >= SOLVED {
        return Some(Stop::Solved);
    }
    let best = |points: &mut dyn Iterator<Item = &Point>| {
        points.map(|p| p.accuracy).fold(f64::NEG_INFINITY, f64::max)
    };
    let half = steps.div_ceil(2);
    let is_old = |point: &&Point| point.step + half <= last.step;
    let old = best(&mut curve.iter().filter(is_old));
    let new = best(&mut curve.iter().filter(|point| !is_old(point)));
    (old > f64::NEG_INFINITY && new < old + RISE).then_some(Stop::Flat)
}

/// The norm of the gradients of all scores' parameters; 0 if there are none.
fn score_gradient(model: &Model, gradients: &GradientsParams) -> f64 {
    let norm = |square: Option<Tensor<1>>| square.map_or(0.0, |sum| sum.into_scalar::<f32>());
    let square = |gradient: Tensor<2>| gradient.square().sum();
    let of_layer = |scorer: &Scorer| match scorer {
        Scorer::Linear(linear) => norm(gradients.get::<2>(linear.score_proj.id).map(square)),
        Scorer::Zoh(zoh) => {
            let a = gradients.get::<1>(zoh.a.id);
            norm(gradients.get::<2>(zoh.dt_proj.id).map(square)) + norm(a.map(|a| a.square().sum()))
        }
    };
    let layers = model.blocks.iter();
    let sum: f32 = layers.map(|b| of_layer(b.attention.scorer())).sum();
    f64::from(sum).sqrt()
}
