//! A line per epoch for an output that is no terminal, in place of burn-train's dashboard.

use std::collections::HashSet;

use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};

/// Prints the losses of each part of an epoch when it ends.
pub struct Epochs {
    /// The parts of an epoch; burn-train calls each of them an epoch.
    parts: usize,
    /// The metrics that are losses.
    losses: HashSet<MetricId>,
    part: usize,
    train: Mean,
    valid: Mean,
}

impl Epochs {
    /// Progress of a training whose epochs have so many parts.
    pub fn new(parts: usize) -> Self {
        Self {
            parts,
            losses: HashSet::new(),
            part: 0,
            train: Mean::default(),
            valid: Mean::default(),
        }
    }
}

/// The mean of the losses since it was last taken.
#[derive(Default)]
struct Mean {
    sum: f64,
    count: usize,
}

impl Mean {
    fn take(&mut self) -> f64 {
        let Self { sum, count } = std::mem::take(self);
        sum / count as f64
    }

    fn add(&mut self, losses: &HashSet<MetricId>, state: &MetricState) {
        if let MetricState::Numeric(entry, Some(value)) = state
            && losses.contains(&entry.metric_id)
        {
            self.sum += value.current();
            self.count += 1;
        }
    }
}

impl MetricsRendererTraining for Epochs {
    fn update_train(&mut self, state: MetricState) {
        self.train.add(&self.losses, &state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.valid.add(&self.losses, &state);
    }
}

impl TrainingProgressLogger for Epochs {
    fn start(&mut self, _: usize, epoch: usize, _: Option<usize>, _: Option<&str>) {
        self.part = epoch;
    }

    fn start_split(&mut self, _: &str, _: usize) {}

    fn update_split(&mut self, _: usize) {}

    fn end_split(&mut self) {
        if self.valid.count > 0 {
            let (train, valid) = (self.train.take(), self.valid.take());
            // Half of the second epoch is 1.50.
            let epoch = match self.parts {
                1 => self.part.to_string(),
                parts => format!("{:.2}", self.part as f64 / parts as f64),
            };
            println!("epoch {epoch}: training {train:.4}, validation {valid:.4}");
        }
    }

    fn update_epoch(&mut self, epoch: usize) {
        self.part = epoch + 1;
    }

    fn end(&mut self) {}

    fn log_event_training(&mut self, _: String) {}
}

impl MetricsRenderer for Epochs {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        if definition.name.as_str() == crate::train::LOSS {
            self.losses.insert(definition.metric_id);
        }
    }
}

// burn-train asks one renderer for training and testing; there is no test split here.
impl MetricsRendererEvaluation for Epochs {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
}

impl EvaluationProgressLogger for Epochs {
    fn start_global_progress(&mut self, _: usize) {}
    fn start_test(&mut self, _: &str, _: usize) {}
    fn update_test_progress(&mut self, _: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _: String) {}
}
