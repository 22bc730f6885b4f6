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

/// Tokens per second of a training, from one update to the next. The mean of an epoch is its tokens over its time.
///
/// An epoch's first step begins the clock and has no value, so neither validation nor the compilation of kernels in the
/// first step counts. Register it behind a metric that reads from the device, as Burn's `LossMetric`: otherwise it
/// measures how fast the host hands work over.
#[derive(Clone)]
pub struct TokensPerSecond {
    name: MetricName,
    /// Weighted by microseconds.
    state: NumericMetricState,
    last: Option<Instant>,
    /// The updates that had a value since the last reset.
    values: usize,
}

impl TokensPerSecond {
    const UNIT: &str = "tokens/s";

    /// A metric whose clock has not begun.
    #[must_use]
    pub fn new() -> Self {
        Self {
            name: Arc::new("Throughput".to_owned()),
            state: NumericMetricState::default(),
            last: None,
            values: 0,
        }
    }

    fn format(&self) -> FormatOptions {
        let options = FormatOptions::new(self.name.clone());
        options.unit(Self::UNIT).precision(0)
    }

    /// A step of so many tokens that ended `now`.
    fn step(&mut self, tokens: usize, now: Instant) -> SerializedEntry {
        let Some(before) = self.last.replace(now) else {
            return SerializedEntry::not_available(Some(Self::UNIT));
        };
        // Two updates at one time are no rate; a microsecond is the least that is counted.
        let time = now.duration_since(before).max(Duration::from_micros(1));
        let micros = time.as_micros() as usize;
        self.state
            .update(tokens as f64 * 1e6 / micros as f64, micros);
        self.values += 1;
        self.state.compute_update(self.format())
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
        self.name.clone()
    }

    fn description(&self) -> Option<String> {
        Some("Tokens that are trained on per second of wall clock".to_owned())
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: Some(Self::UNIT.to_owned()),
            higher_is_better: true,
        }
        .into()
    }

    fn update(
        &mut self,
        item: &TokenCount,
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.step(item.0, Instant::now()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(match self.values {
            0 => SerializedEntry::not_available(Some(Self::UNIT)),
            _ => self.state.compute_final(self.format()),
        })
    }

    fn clear(&mut self) {
        self.state.reset();
        self.last = None;
        self.values = 0;
    }
}

impl Numeric for TokensPerSecond {
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

/// The memory that Burn's allocator holds on a device, in MiB: reserved, free pages included. An epoch's number is the
/// mean over its steps. CubeCL's backends tell it; on others there is no value.
#[derive(Clone)]
pub struct DeviceMemory {
    name: MetricName,
    device: Device,
    state: NumericMetricState,
    /// The updates that had a value since the last reset.
    values: usize,
}

impl DeviceMemory {
    const UNIT: &str = "MiB";

    /// A metric of this device.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        Self {
            name: Arc::new("Device memory".to_owned()),
            device: device.clone(),
            state: NumericMetricState::default(),
            values: 0,
        }
    }

    fn format(&self) -> FormatOptions {
        let options = FormatOptions::new(self.name.clone());
        options.unit(Self::UNIT).precision(0)
    }

    /// A step after which so many bytes are reserved.
    fn step(&mut self, reserved: Option<u64>) -> SerializedEntry {
        let Some(bytes) = reserved else {
            return SerializedEntry::not_available(Some(Self::UNIT));
        };
        self.state.update(bytes as f64 / f64::from(1 << 20), 1);
        self.values += 1;
        self.state.compute_update(self.format())
    }
}

impl Metric for DeviceMemory {
    type Input = ();

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn description(&self) -> Option<String> {
        Some("Memory that Burn's allocator has reserved on the device".to_owned())
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: Some(Self::UNIT.to_owned()),
            higher_is_better: false,
        }
        .into()
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
        Ok(match self.values {
            0 => SerializedEntry::not_available(Some(Self::UNIT)),
            _ => self.state.compute_final(self.format()),
        })
    }

    fn clear(&mut self) {
        self.state.reset();
        self.values = 0;
    }
}

impl Numeric for DeviceMemory {
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
