//! Reports of Burn's loop, and its learning rates.

use super::config::{Evaluated, TextTraining};
use burn::optim::LearningRate;
use burn::optim::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use burn::tensor::{ExecutionError, Tensor, TensorReadError};
use burn::train::ItemLazy;
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{
    Adaptor, Metric, MetricDefinition, MetricMetadata, MetricName, SerializedEntry,
};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// A mean loss, `[1]`, and what it counts for.
#[derive(Clone)]
pub(super) struct Loss {
    mean: Tensor<1>,
    weight: usize,
}

impl Loss {
    pub fn new(mean: Tensor<1>, weight: usize) -> Self {
        Self {
            mean: mean.detach(),
            weight,
        }
    }
}

impl ItemLazy for Loss {
    fn sync(self) -> Result<Self, ExecutionError> {
        // The metrics' thread reads it; it must neither wait for an idle queue nor hold the graph.
        self.mean.device().flush()?;
        let mean = self.mean.without_autodiff();
        Ok(Self { mean, ..self })
    }
}

impl Adaptor<Loss> for Loss {
    fn adapt(&self) -> Loss {
        self.clone()
    }
}

/// Sum of losses, and of what they count for.
#[derive(Clone, Copy, Default)]
struct Sum {
    loss: f64,
    weight: usize,
}

/// Losses up to an evaluation: a metric of the training, and of the validation that follows, whose end sends both.
#[derive(Clone)]
pub(super) struct Reports {
    training: Arc<TextTraining>,
    is_of_training: bool,
    /// Of the training and of the validation.
    sums: Arc<Mutex<[Sum; 2]>>,
    /// Evaluations done.
    done: usize,
    start: Instant,
    to: Sender<Evaluated>,
}

impl Reports {
    /// The validation's, and where evaluations arrive.
    pub fn new(training: Arc<TextTraining>, done: usize) -> (Self, Receiver<Evaluated>) {
        let (to, evaluated) = channel();
        let reports = Self {
            training,
            is_of_training: false,
            sums: Arc::default(),
            done,
            start: Instant::now(),
            to,
        };
        (reports, evaluated)
    }

    /// The training's.
    pub fn of_training(&self) -> Self {
        Self {
            is_of_training: true,
            ..self.clone()
        }
    }
}

impl Metric for Reports {
    type Input = Loss;

    fn name(&self) -> MetricName {
        Arc::new("Loss".into())
    }

    fn update(
        &mut self,
        loss: &Loss,
        _: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        let mean = loss.mean.clone().try_into_scalar::<f64>()?;
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = &mut sums[usize::from(!self.is_of_training)];
        sum.loss += mean * loss.weight as f64;
        sum.weight += loss.weight;
        Ok(nothing())
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        if self.is_of_training {
            return Ok(nothing());
        }
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let [training, validation] = std::mem::take(&mut *sums);
        let [begin, end] = [self.done, self.done + 1].map(|done| self.training.end(done));
        self.done += 1;
        // Nobody may wait for it any more.
        let _ = self.to.send(Evaluated {
            step: end,
            // Each device reports its share of a step's mean.
            training_loss: (training.loss / (end - begin).max(1) as f64) as f32,
            validation_loss: validation.loss / validation.weight.max(1) as f64,
            time: self.start.elapsed(),
        });
        Ok(nothing())
    }

    fn clear(&mut self) {}
}

fn nothing() -> SerializedEntry {
    SerializedEntry::new(String::new(), String::new())
}

/// Learning rates of a training's steps.
#[derive(Clone)]
pub(super) struct Schedule {
    training: Arc<TextTraining>,
    step: usize,
}

impl Schedule {
    /// The rates after `step` steps.
    pub fn new(training: Arc<TextTraining>, step: usize) -> Self {
        Self { training, step }
    }
}

impl LrScheduler for Schedule {
    fn step(&mut self) -> LearningRate {
        self.step += 1;
        self.training.rate_at(self.step - 1)
    }

    /// Nothing: the number of the checkpoint says the step.
    fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::new()
    }

    fn load_record(&mut self, _: LrSchedulerRecord) {}
}

/// Shows nothing: what is to be seen goes through [`Reports`].
pub(super) struct Quiet;

impl MetricsRenderer for Quiet {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _: MetricDefinition) {}
}

impl MetricsRendererTraining for Quiet {
    fn update_train(&mut self, _: MetricState) {}

    fn update_valid(&mut self, _: MetricState) {}
}

impl MetricsRendererEvaluation for Quiet {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
}

impl TrainingProgressLogger for Quiet {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}

    fn update_epoch(&mut self, _: usize) {}

    fn start_split(&mut self, _: &str, _: usize) {}

    fn update_split(&mut self, _: usize) {}

    fn end_split(&mut self) {}

    fn end(&mut self) {}

    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for Quiet {
    fn start_global_progress(&mut self, _: usize) {}

    fn start_test(&mut self, _: &str, _: usize) {}

    fn update_test_progress(&mut self, _: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _: String) {}
}
