//! A metric of selections and of the gradients of scores, for Burn's training loop (feature `train`).
//!
//! [`SelectionMetric`] shows one [`Measure`]; a step provides a [`SelectionInput`]. A step of
//! [`TrainStep`](burn::train::TrainStep) has the gradients, so it provides their norm, which costs little:
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn::train::metric::Adaptor;
//! use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Selection};
//! use burn_flash_dma::train::SelectionInput;
//!
//! /// Output of a step: the loss, and the input of the metrics.
//! struct Output {
//!     loss: Tensor<1>,
//!     selection: SelectionInput,
//! }
//!
//! impl Adaptor<SelectionInput> for Output {
//!     fn adapt(&self) -> SelectionInput {
//!         self.selection.clone()
//!     }
//! }
//!
//! fn step(layer: &DynamicMaskAttention, x: Tensor<3>) -> Output {
//!     let loss = layer.forward(x.clone()).powi_scalar(2).mean();
//! // `TrainOutput::new` takes the gradients, so they are read first.
//!     let grads = loss.backward();
//!     let selection = SelectionInput::new().gradients_of(layer.scorer(), &grads);
//!     Output { loss, selection: selection.layer(layer, x) }
//! }
//!
//! let device = Device::flex().autodiff();
//! let layer = DynamicMaskAttentionConfig::new(32, 4).with_selection(Selection::keep(8)).init(&device);
//! let output = step(&layer, Tensor::random([2, 20, 32], Distribution::Default, &device));
//! assert!(output.loss.into_scalar::<f32>() > 0.0);
//! # }
//! ```
//!
//! [`SelectionInput::layer`] selects once more, and the metric reads 8 bytes per key and head: validation steps
//! ([`InferenceStep`](burn::train::InferenceStep)) are the place for it. Metrics skip whatever a step does not
//! provide.

use crate::functions::inspection::IntervalStats;
use crate::functions::selection::Intervals;
use crate::nn::{DynamicMaskAttention, DynamicMaskInput, Scorer};
use crate::validate::{expect, scores_as_f32};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Gradients, Tensor, TensorReadError};
use burn::train::metric::state::{FormatOptions, NumericMetricState};
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};
use std::sync::{Arc, OnceLock};

/// Quantity that a [`SelectionMetric`] shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Measure {
    /// Mean number of keys that a position attends to
    /// ([`IntervalStats::mean_alive`](crate::IntervalStats::mean_alive)).
    KeysAlive,
    /// Mean number of positions that attend to a key, over the keys with any
    /// ([`IntervalStats::mean_lifetime`](crate::IntervalStats::mean_lifetime)).
    Lifetime,
    /// Share of attended pairs whose key is recent, in percent
    /// ([`IntervalStats::recent`](crate::IntervalStats::recent)).
    Recents,
    /// Share of positions at which an index decides instead of a score, in percent ([`Intervals::tie_rate`]).
    Ties,
    /// Euclidean norm of the gradients of the scores or their parameters, over all layers.
    ScoreGradient,
}

impl Measure {
    /// All measures.
    pub const ALL: [Self; 5] = [
        Self::KeysAlive,
        Self::Lifetime,
        Self::Recents,
        Self::Ties,
        Self::ScoreGradient,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::KeysAlive => "Keys alive",
            Self::Lifetime => "Lifetime of keys",
            Self::Recents => "Share of recent keys",
            Self::Ties => "Ties of scores",
            Self::ScoreGradient => "Gradient of scores",
        }
    }

    fn unit(self) -> Option<&'static str> {
        match self {
            Self::KeysAlive => Some("keys"),
            Self::Lifetime => Some("positions"),
            Self::Recents | Self::Ties => Some("%"),
            Self::ScoreGradient => None,
        }
    }
}

/// Selections of a step and the gradients of its scores. Clones share values that have been read. Holds no autodiff
/// graph.
#[derive(Clone, Debug, Default)]
pub struct SelectionInput {
    layers: Vec<Layer>,
    /// Sum of the squares of all gradients, one number.
    squares: Option<Tensor<1>>,
}

#[derive(Clone, Debug)]
struct Layer {
    intervals: Intervals,
    scores: Tensor<3>,
    /// Statistics and tie rate, once they have been read.
    read: Arc<OnceLock<(IntervalStats, f64)>>,
}

impl SelectionInput {
    /// An input without data.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a layer's selection for an input: computes scores and selection once more. With several layers a metric
    /// shows their mean.
    ///
    /// # Panics
    ///
    /// If [`DynamicMaskAttention::try_forward`] or [`DynamicMaskAttention::try_selection`] would return an error for
    /// the input, with that error's text.
    #[must_use]
    pub fn layer(self, layer: &DynamicMaskAttention, input: impl Into<DynamicMaskInput>) -> Self {
        let input = input.into();
        let scores = layer.scores(input.clone());
        self.selection(&layer.selection(input), scores)
    }

    /// Adds a selection, with the scores `[batch, kv_heads, k_len]` it was made from.
    ///
    /// # Panics
    ///
    /// If the scores are not f32, f16 or bf16, with the text of
    /// [`AttentionError::ElementType`](crate::AttentionError::ElementType), or have another shape than the intervals.
    #[must_use]
    pub fn selection(mut self, intervals: &Intervals, scores: Tensor<3>) -> Self {
        let [batch, heads, k_len, _] = intervals.tensor().dims();
        assert_eq!(scores.dims(), [batch, heads, k_len], "the shape of scores");
        self.layers.push(Layer {
            intervals: intervals.clone().without_autodiff(),
            scores: expect(scores_as_f32(scores.without_autodiff())),
            read: Arc::default(),
        });
        self
    }

    /// Adds a gradient, for example that of the scores given to [`DynamicMaskAttention::forward_with_scores`]:
    /// `scores.grad(&grads)`.
    #[must_use]
    pub fn gradient<const D: usize>(mut self, gradient: Tensor<D>) -> Self {
        let gradient = gradient.without_autodiff().cast(DType::F32);
        let squares = gradient.powi_scalar(2).sum();
        self.squares = Some(match self.squares {
            None => squares,
            Some(sum) => sum + squares,
        });
        self
    }

    /// Adds the gradients of the parameters of a layer's scores ([`DynamicMaskAttention::scorer`]), as far as the
    /// backward pass has given any.
    #[must_use]
    pub fn gradients_of(self, scorer: &Scorer, grads: &Gradients) -> Self {
        self.gradients_from(scorer, Source::Graph(grads))
    }

    /// [`gradients_of`](Self::gradients_of) from the gradients for an optimiser.
    #[must_use]
    pub fn gradients_in(self, scorer: &Scorer, gradients: &GradientsParams) -> Self {
        self.gradients_from(scorer, Source::Optimiser(gradients))
    }

    fn gradients_from(self, scorer: &Scorer, source: Source<'_>) -> Self {
        let mut visitor = Add {
            source,
            input: self,
        };
        scorer.visit(&mut visitor);
        visitor.input
    }

    /// Value of a measure, if the step has provided its data.
    fn measure(&self, measure: Measure) -> Result<Option<f64>, TensorReadError> {
        if measure == Measure::ScoreGradient {
            let Some(squares) = self.squares.clone() else {
                return Ok(None);
            };
            return Ok(Some(squares.try_into_scalar::<f64>()?.sqrt()));
        }
        let mut sum = 0.0;
        for layer in &self.layers {
            let (stats, ties) = layer.read()?;
            sum += match measure {
                Measure::KeysAlive => stats.mean_alive,
                Measure::Lifetime => stats.mean_lifetime,
                Measure::Recents => 100.0 * stats.recent,
                _ => 100.0 * ties,
            };
        }
        let layers = self.layers.len();
        Ok((layers > 0).then(|| sum / layers as f64))
    }

    fn batch(&self) -> usize {
        let first = self.layers.first();
        first.map_or(1, |layer| layer.scores.dims()[0])
    }
}

enum Source<'a> {
    Graph(&'a Gradients),
    Optimiser(&'a GradientsParams),
}

struct Add<'a> {
    source: Source<'a>,
    input: SelectionInput,
}

impl ModuleVisitor for Add<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = match self.source {
            Source::Graph(gradients) => param.val().grad(gradients),
            Source::Optimiser(gradients) => gradients.get::<D>(param.id),
        };
        if let Some(gradient) = gradient {
            self.input = std::mem::take(&mut self.input).gradient(gradient);
        }
    }
}

impl Layer {
    /// Reads once for all metrics.
    fn read(&self) -> Result<(IntervalStats, f64), TensorReadError> {
        if let Some(numbers) = self.read.get() {
            return Ok(*numbers);
        }
        let lifetimes = self.intervals.read_lifetimes()?;
        let scores = self.scores.clone().try_into_data_as::<f32>()?;
        let scores: Vec<f32> = scores.iter::<f32>().collect();
        let ties = self.intervals.tie_rate_of(&lifetimes, &scores);
        let numbers = (self.intervals.stats_of(&lifetimes), ties);
        Ok(*self.read.get_or_init(|| numbers))
    }
}

/// One [`Measure`] as a numeric metric, to be registered with
/// `SupervisedTraining::metric_train_numeric` or `metric_valid_numeric`.
#[derive(Clone)]
pub struct SelectionMetric {
    measure: Measure,
    name: MetricName,
    state: NumericMetricState,
    /// Number of updates with a value since the last reset.
    values: usize,
}

impl SelectionMetric {
    /// The metric of a measure, before its first step.
    #[must_use]
    pub fn new(measure: Measure) -> Self {
        Self {
            measure,
            name: Arc::new(measure.name().to_owned()),
            state: NumericMetricState::default(),
            values: 0,
        }
    }

    fn format(&self) -> FormatOptions {
        let options = FormatOptions::new(self.name.clone()).precision(3);
        match self.measure.unit() {
            None => options,
            Some(unit) => options.unit(unit),
        }
    }
}

impl Metric for SelectionMetric {
    type Input = SelectionInput;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: self.measure.unit().map(str::to_owned),
            higher_is_better: self.measure != Measure::Ties,
        }
        .into()
    }

    fn update(
        &mut self,
        item: &SelectionInput,
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        let Some(value) = item.measure(self.measure)? else {
            return Ok(SerializedEntry::not_available(self.measure.unit()));
        };
        self.state.update(value, item.batch());
        self.values += 1;
        Ok(self.state.compute_update(self.format()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(match self.values {
            0 => SerializedEntry::not_available(self.measure.unit()),
            _ => self.state.compute_final(self.format()),
        })
    }

    fn clear(&mut self) {
        self.state.reset();
        self.values = 0;
    }
}

impl Numeric for SelectionMetric {
    fn value(&self) -> Option<NumericEntry> {
        (self.values > 0).then(|| self.state.current_value())
    }

    fn running_value(&self) -> Option<NumericEntry> {
        (self.values > 0).then(|| self.state.running_value())
    }

    fn final_value(&self) -> NumericEntry {
        self.state.final_value()
    }
}
