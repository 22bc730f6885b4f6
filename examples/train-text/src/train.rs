//! One training run, by burn-train.

use std::fs;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::prelude::*;
use burn::train::metric::{Adaptor, LearningRateMetric, LossInput, LossMetric};
use burn::train::{
    ExecutionStrategy, InferenceStep, ItemLazy, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_flash_dma::train::{Measure, SelectionInput, SelectionMetric, clip_gradients};
use flash_dma_models::nn::Decoder;

use crate::checkpoints;
use crate::cli::Settings;
use crate::curves::{Curve, Timings};
use crate::data::Text;
use crate::error::Error;
use crate::loader::{Batch, EpochTimes, WindowLoader};
use crate::progress::PlainProgress;

/// burn-train's name of the metric that holds the loss.
pub const LOSS: &str = "Loss";

/// At most this many validation windows, so that validating costs a small part of an epoch.
const VALID_WINDOWS: usize = 64;

/// The gradients of all parameters together are clipped to this norm.
pub const MAX_NORM: f64 = 1.0;

/// One step in this many warms up.
const WARM_UP_SHARE: usize = 20;

/// A finished training.
pub struct Run {
    /// The model, without autodiff.
    pub model: Decoder,
    /// Its losses and times.
    pub curve: Curve,
}

/// The model as burn-train trains it.
#[derive(Module, Debug)]
pub struct Student {
    /// The model.
    pub model: Decoder,
}

/// The loss of a step, and what the metrics of the selections need.
pub struct StepOutput {
    loss: Tensor<1>,
    selections: SelectionInput,
}

impl ItemLazy for StepOutput {
    fn sync(self) -> Result<Self, burn::tensor::ExecutionError> {
        // The metrics' thread reads the loss; it must neither wait for an idle queue nor hold the
        // autodiff graph.
        self.loss.device().flush()?;
        Ok(Self {
            loss: self.loss.without_autodiff(),
            selections: self.selections,
        })
    }
}

impl Adaptor<LossInput> for StepOutput {
    fn adapt(&self) -> LossInput {
        LossInput::new(self.loss.clone())
    }
}

// ANCHOR: metrics
impl Adaptor<SelectionInput> for StepOutput {
    fn adapt(&self) -> SelectionInput {
        self.selections.clone()
    }
}

impl TrainStep for Student {
    type Input = Batch;
    type Output = StepOutput;

    fn step(&self, batch: Batch) -> TrainOutput<StepOutput> {
        let loss = (self.model).try_loss_and_backward(batch.inputs, batch.targets, None);
        let (loss, backward) = loss.expect("windows fit the model");
        let mut grads = backward();
        let selections = self.model.score_gradients(&grads);
        clip_gradients(self, &mut grads, MAX_NORM);
        let item = StepOutput { loss, selections };
        TrainOutput { grads, item }
    }
}

impl InferenceStep for Student {
    type Input = Batch;
    type Output = StepOutput;

    fn step(&self, batch: Batch) -> StepOutput {
        let loss = (self.model).try_loss_and_selections(batch.inputs, batch.targets);
        let (loss, selections) = loss.expect("windows fit the model");
        StepOutput { loss, selections }
    }
}
// ANCHOR_END: metrics

/// Trains a model from `settings.seed` in `dir`, or goes on from the last checkpoint there.
///
/// # Errors
///
/// [`Error::Io`] if `dir` cannot be written, [`Error::Training`] if Burn stopped.
pub fn train(
    settings: &Settings,
    label: &str,
    text: &Arc<Text>,
    device: &Device,
    dir: &Path,
    resume: bool,
) -> Result<Run, Error> {
    fs::create_dir_all(dir).map_err(Error::io(dir))?;
    let done = if resume { checkpoints::last(dir) } else { None };
    if done.is_none() {
        checkpoints::clear(dir)?;
    }

    device.seed(settings.seed);
    let model = Student {
        model: settings.model().init(&device.clone().autodiff()),
    };
    let parameters = model.num_params();
    let steps = settings.steps_an_epoch();
    let epochs_done = done.unwrap_or(0);
    let train = WindowLoader::train(
        text.clone(),
        settings.batch,
        steps,
        settings.seed,
        epochs_done,
        device,
    );
    let valid = WindowLoader::valid(text.clone(), settings.batch, VALID_WINDOWS, device);
    let (train_times, valid_times) = (train.times(), valid.times());

    let mut training = SupervisedTraining::new(dir, Arc::new(train), Arc::new(valid))
        .metric_train_numeric(LossMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .metric_train_numeric(LearningRateMetric::new())
        // ANCHOR: register
        .metric_train_numeric(SelectionMetric::new(Measure::ScoreGradient))
        .metric_valid_numeric(SelectionMetric::new(Measure::KeysAlive))
        .metric_valid_numeric(SelectionMetric::new(Measure::Lifetime))
        .metric_valid_numeric(SelectionMetric::new(Measure::Ties))
        // ANCHOR_END: register
        .with_default_checkpointers()
        .with_application_logger(None)
        .with_training_strategy(ExecutionStrategy::single(device.clone().autodiff()).into())
        .num_epochs(settings.evaluations)
        .label(label);
    if let Some(epoch) = done {
        training = training.checkpoint(epoch);
    }
    if !std::io::stdout().is_terminal() {
        let progress = PlainProgress::new(settings.batch, steps, settings.total_steps());
        training = training.renderer(Box::new(progress));
    }
    let result = training.launch(Learner::new(model, optimiser(), schedule(settings)));
    if let Some(error) = result.error {
        return Err(Error::Training(error.to_string()));
    }
    // The dashboard gives the terminal back when it is dropped.
    drop(result.renderer);

    let timings = timings(steps, &train_times, &valid_times);
    let curve = Curve::read(dir, label, settings, parameters, timings)?;
    Ok(Run {
        model: result.model.model,
        curve,
    })
}

/// AdamW, as every training here uses it, for gradients that are clipped.
pub fn optimiser() -> ModuleOptimizer {
    AdamWConfig::new()
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.01)
        .init()
}

/// Linear warm-up, then a cosine down to a tenth of the peak.
fn schedule(settings: &Settings) -> ModuleLrScheduler {
    let (steps, lr) = (settings.total_steps(), settings.lr);
    let warm_up = steps.div_ceil(WARM_UP_SHARE);
    let cosine = CosineAnnealingLrSchedulerConfig::new(lr, (steps - warm_up).max(1));
    SequentialLrSchedulerConfig::new(
        vec![
            LinearLrSchedulerConfig::new(lr / warm_up as f64, lr, warm_up).into(),
            cosine.with_min_lr(lr / 10.0).into(),
        ],
        vec![warm_up],
    )
    .init()
    .expect("checked settings give a valid schedule")
}

fn timings(steps: usize, train: &EpochTimes, valid: &EpochTimes) -> Timings {
    let train = train.lock().expect("no holder of the lock panics");
    let valid = valid.lock().expect("no holder of the lock panics");
    // The first epoch compiles kernels and warms up.
    let warm = if train.len() > 1 {
        &train[1..]
    } else {
        &train[..]
    };
    let mean = warm.iter().sum::<f64>() / warm.len() as f64;
    Timings {
        train_seconds: train.iter().sum(),
        valid_seconds: valid.iter().sum(),
        first_epoch_seconds: train.first().copied(),
        step_milliseconds: (!warm.is_empty()).then_some(mean * 1e3 / steps as f64),
    }
}

#[cfg(all(test, feature = "flex"))]
#[path = "train_tests.rs"]
pub(crate) mod tests;
