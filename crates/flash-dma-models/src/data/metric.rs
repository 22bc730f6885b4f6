//! Metrics of Burn's training loop: tokens per second, and memory on a device (feature `train`).
//!
//! Burn has those of the host and of NVIDIA's driver (its feature `metrics`); `burn_flash_dma::train::SelectionMetric`
//! has those of the selection.

use burn::tensor::{Device, TensorReadError};
use burn::train::metric::state::{FormatOptions, NumericMetricState};
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The tokens of a step, for [`TokensPerSecond`]. A step's output hands it over:
///
/// ```
/// use burn::train::metric::Adaptor;
/// use flash_dma_models::data::TokenCount;
///
/// struct Output {
///     /// `Batch::tokens`, of the step's batch.
///     tokens: usize,
/// }
///
/// impl Adaptor<TokenCount> for Output {
///     fn adapt(&self) -> TokenCount {
///         TokenCount(self.tokens)
///     }
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCount(pub usize);

/// The values of an epoch, of which there may be none.
#[derive(Clone)]
struct Values {
    name: MetricName,
    unit: &'static str,
    state: NumericMetricState,
    count: usize,
}

impl Values {
    fn new(name: &str, unit: &'static str) -> Self {
        Self {
            name: Arc::new(name.to_owned()),
            unit,
            state: NumericMetricState::default(),
            count: 0,
        }
    }

    fn attributes(&self, higher_is_better: bool) -> MetricAttributes {
        let unit = Some(self.unit.to_owned());
        MetricAttributes::from(NumericAttributes {
            unit,
            higher_is_better,
        })
    }

    fn format(&self) -> FormatOptions {
        let options = FormatOptions::new(self.name.clone());
        options.unit(self.unit).precision(0)
    }

    /// What a step without a value shows.
    fn none(&self) -> SerializedEntry {
        SerializedEntry::not_available(Some(self.unit))
    }

    /// A step's value, which counts as often as its weight says.
    fn add(&mut self, value: f64, weight: usize) -> SerializedEntry {
        self.state.update(value, weight);
        self.count += 1;
        self.state.compute_update(self.format())
    }

    fn compute(&mut self) -> SerializedEntry {
        match self.count {
            0 => self.none(),
            _ => self.state.compute_final(self.format()),
        }
    }

    fn clear(&mut self) {
        self.state.reset();
        self.count = 0;
    }
}

impl Numeric for Values {
    fn value(&self) -> Option<NumericEntry> {
        (self.count > 0).then(|| self.state.current_value())
    }

    fn running_value(&self) -> Option<NumericEntry> {
        (self.count > 0).then(|| self.state.running_value())
    }

    fn final_value(&self) -> NumericEntry {
        self.state.final_value()
    }
}

/// Tokens per second of a training, from one update to the next. The mean of an epoch is its tokens over its time.
///
/// An epoch's first step begins the clock and has no value, so neither validation nor the compilation of kernels in the
/// first step counts. Register it behind a metric that reads from the device, as Burn's `LossMetric`: otherwise it
/// measures how fast the host hands work over.
#[derive(Clone)]
pub struct TokensPerSecond {
    /// Weighted by microseconds.
    values: Values,
    last: Option<Instant>,
}

impl TokensPerSecond {
    /// A metric whose clock has not begun.
    #[must_use]
    pub fn new() -> Self {
        Self {
            values: Values::new("Throughput", "tokens/s"),
            last: None,
        }
    }

    /// A step of so many tokens that ended `now`.
    fn step(&mut self, tokens: usize, now: Instant) -> SerializedEntry {
        let Some(before) = self.last.replace(now) else {
            return self.values.none();
        };
        // Two updates at one time are no rate; a microsecond is the least that is counted.
        let time = now.duration_since(before).max(Duration::from_micros(1));
        let micros = time.as_micros() as usize;
        self.values.add(tokens as f64 * 1e6 / micros as f64, micros)
    }
}

impl Default for TokensPerSecond {
    fn default() -> Self {
        Self::new()
    }
}

impl Metric for TokensPerSecond {
    type Input = TokenCount;

    fn name(&self) -> MetricName {
        self.values.name.clone()
    }

    fn description(&self) -> Option<String> {
        Some("Tokens that are trained on per second of wall clock".to_owned())
    }

    fn attributes(&self) -> MetricAttributes {
        self.values.attributes(true)
    }

    fn update(
        &mut self,
        item: &TokenCount,
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.step(item.0, Instant::now()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.values.compute())
    }

    fn clear(&mut self) {
        self.values.clear();
        self.last = None;
    }
}

impl Numeric for TokensPerSecond {
    fn value(&self) -> Option<NumericEntry> {
        self.values.value()
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.values.running_value()
    }

    fn final_value(&self) -> NumericEntry {
        self.values.final_value()
    }
}

/// The memory that Burn's allocator holds on a device, in MiB: reserved, free pages included. An epoch's number is the
/// mean over its steps. CubeCL's backends tell it; on others there is no value.
#[derive(Clone)]
pub struct DeviceMemory {
    device: Device,
    values: Values,
}

impl DeviceMemory {
    /// A metric of this device.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            values: Values::new("Device memory", "MiB"),
        }
    }

    /// A step after which so many bytes are reserved.
    fn step(&mut self, reserved: Option<u64>) -> SerializedEntry {
        match reserved {
            Some(bytes) => self.values.add(bytes as f64 / f64::from(1 << 20), 1),
            None => self.values.none(),
        }
    }
}

impl Metric for DeviceMemory {
    type Input = ();

    fn name(&self) -> MetricName {
        self.values.name.clone()
    }

    fn description(&self) -> Option<String> {
        Some("Memory that Burn's allocator has reserved on the device".to_owned())
    }

    fn attributes(&self) -> MetricAttributes {
        self.values.attributes(false)
    }

    fn update(
        &mut self,
        (): &(),
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        let usage = self.device.memory_pool_usage();
        Ok(self.step(usage.map(|usage| usage.bytes_reserved)))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.values.compute())
    }

    fn clear(&mut self) {
        self.values.clear();
    }
}

impl Numeric for DeviceMemory {
    fn value(&self) -> Option<NumericEntry> {
        self.values.value()
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.values.running_value()
    }

    fn final_value(&self) -> NumericEntry {
        self.values.final_value()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(entry: Option<NumericEntry>) -> f64 {
        entry.expect("a value").current()
    }

    #[test]
    fn an_epochs_throughput_is_its_tokens_over_its_time() {
        let mut metric = TokensPerSecond::new();
        let begin = Instant::now();
        let at = |millis| begin + Duration::from_millis(millis);
        assert!(metric.step(7_000_000, begin).is_not_available());
        assert!(metric.value().is_none() && metric.running_value().is_none());
        assert!(metric.compute().unwrap().is_not_available());
        metric.step(1000, at(100));
        assert_eq!(shown(metric.value()), 10_000.0);
        metric.step(1000, at(500));
        assert_eq!(shown(metric.value()), 2500.0);
        assert_eq!(shown(metric.running_value()), 4000.0);
        assert_eq!(metric.final_value().current(), 4000.0);
        // What lies between epochs does not count.
        metric.clear();
        assert!(metric.step(1, at(900_000)).is_not_available());
        metric.step(500, at(901_000));
        assert_eq!(shown(metric.running_value()), 500.0);
    }

    #[test]
    fn two_steps_at_one_time_have_a_finite_rate() {
        let mut metric = TokensPerSecond::new();
        let now = Instant::now();
        metric.step(1, now);
        metric.step(3, now);
        assert_eq!(shown(metric.value()), 3e6);
    }

    #[cfg(feature = "flex")]
    #[test]
    fn memory_is_shown_where_the_device_tells_it() {
        let mut metric = DeviceMemory::new(&Device::flex());
        let usage = metric.device.memory_pool_usage();
        assert!(
            metric
                .step(usage.map(|usage| usage.bytes_reserved))
                .is_not_available()
        );
        assert!(metric.value().is_none() && metric.compute().unwrap().is_not_available());
        metric.step(Some(3 << 20));
        metric.step(Some(5 << 20));
        assert_eq!(shown(metric.value()), 5.0);
        assert_eq!(metric.final_value().current(), 4.0);
        metric.clear();
        assert!(metric.value().is_none());
    }

    #[cfg(feature = "cpu")]
    #[test]
    fn what_a_tensor_needs_is_reserved() {
        let device = Device::cpu();
        let mut metric = DeviceMemory::new(&device);
        let tensor = burn::tensor::Tensor::<1>::ones([1 << 20], &device);
        let progress = burn::data::dataloader::Progress::new(1, 1, None);
        let metadata = MetricMetadata {
            progress,
            iteration: None,
            lr: None,
        };
        assert_eq!(tensor.clone().sum().into_scalar::<f32>(), 1_048_576.0);
        metric.update(&(), &metadata).unwrap();
        assert!(shown(metric.value()) >= 4.0);
    }
}
