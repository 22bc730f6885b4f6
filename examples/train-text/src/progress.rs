//! Plain progress for an output that is no terminal: one line every few seconds and one for every
//! validation. In a terminal burn-train's own dashboard runs instead.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};

const INTERVAL: Duration = Duration::from_secs(5);

/// Prints the loss as training goes on.
pub struct PlainProgress {
    batch: usize,
    steps_an_epoch: usize,
    total_steps: usize,
    losses: HashSet<MetricId>,
    epoch: usize,
    step: usize,
    training: bool,
    train: Mean,
    valid: Mean,
    begun: Instant,
    printed: Instant,
}

/// The mean of the losses since it was last taken.
#[derive(Default)]
struct Mean {
    sum: f64,
    count: usize,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    fn take(&mut self) -> f64 {
        let Self { sum, count } = std::mem::take(self);
        sum / count as f64
    }
}

impl PlainProgress {
    /// Progress of a run of `total_steps` steps of `batch` windows.
    pub fn new(batch: usize, steps_an_epoch: usize, total_steps: usize) -> Self {
        Self {
            batch,
            steps_an_epoch,
            total_steps,
            losses: HashSet::new(),
            epoch: 1,
            step: 0,
            training: true,
            train: Mean::default(),
            valid: Mean::default(),
            begun: Instant::now(),
            printed: Instant::now(),
        }
    }

    fn loss(&self, state: &MetricState) -> Option<f64> {
        match state {
            MetricState::Numeric(entry, Some(value)) => self
                .losses
                .contains(&entry.metric_id)
                .then(|| value.current()),
            _ => None,
        }
    }

    fn print(&mut self, what: &str, loss: f64) {
        let elapsed = self.begun.elapsed().as_secs();
        println!(
            "step {:>6} of {}  {what} {loss:.3}  {elapsed:>4} s",
            self.step, self.total_steps
        );
        self.printed = Instant::now();
    }
}

impl MetricsRendererTraining for PlainProgress {
    fn update_train(&mut self, state: MetricState) {
        if let Some(loss) = self.loss(&state) {
            self.train.add(loss);
        }
    }

    fn update_valid(&mut self, state: MetricState) {
        if let Some(loss) = self.loss(&state) {
            self.valid.add(loss);
        }
    }
}

impl TrainingProgressLogger for PlainProgress {
    fn start(&mut self, _: usize, starting_epoch: usize, _: Option<usize>, label: Option<&str>) {
        self.epoch = starting_epoch;
        self.step = (starting_epoch - 1) * self.steps_an_epoch;
        let label = label.unwrap_or("the model");
        println!("training {label}, losses in nats a byte");
    }

    fn start_split(&mut self, split: &str, _: usize) {
        self.training = split == "train";
    }

    fn update_split(&mut self, items_processed: usize) {
        if self.training {
            self.step =
                (self.epoch - 1) * self.steps_an_epoch + items_processed.div_ceil(self.batch);
            if self.printed.elapsed() >= INTERVAL {
                let loss = self.train.take();
                self.print("training  ", loss);
            }
        }
    }

    fn end_split(&mut self) {
        if !self.training {
            let loss = self.valid.take();
            self.print("validation", loss);
        }
    }

    fn update_epoch(&mut self, epoch: usize) {
        self.epoch = epoch + 1;
    }

    fn end(&mut self) {}

    fn log_event_training(&mut self, _: String) {}
}

impl MetricsRenderer for PlainProgress {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        if definition.name.as_str() == crate::train::LOSS {
            self.losses.insert(definition.metric_id);
        }
    }
}

// burn-train asks one renderer for training and testing; there is no test split here.
impl MetricsRendererEvaluation for PlainProgress {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
}

impl EvaluationProgressLogger for PlainProgress {
    fn start_global_progress(&mut self, _: usize) {}
    fn start_test(&mut self, _: &str, _: usize) {}
    fn update_test_progress(&mut self, _: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _: String) {}
}
