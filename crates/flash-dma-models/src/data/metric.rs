//! Metrics of Burn's training loop: tokens per second, and memory on a device (feature `train`).
//!
//! Burn has metrics of the host and of NVIDIA's driver (its feature `metrics`);
//! `burn_flash_dma::train::SelectionMetric` those of the selection.

use burn::tensor::{Device, TensorReadError};
use burn::train::metric::state::{FormatOptions, NumericMetricState};
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens of a step, for [`TokensPerSecond`]. A step's output provides it:
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

/// Implements Burn's metric for a struct with the values of an epoch in `state`; `restart` begins an epoch and
/// `measure` evaluates a step.
macro_rules! metric {
    ($metric:ident of $input:ty: $name:literal, $unit:literal, $higher_is_better:literal, $description:literal) => {
        impl $metric {
            /// Shows the value of a step, averaged with its weight.
            fn show(&mut self, value: Option<(f64, usize)>) -> SerializedEntry {
                let Some((value, weight)) = value else {
                    return SerializedEntry::not_available(Some($unit));
                };
                self.state.update(value, weight);
                self.state.compute_update(self.format())
            }

            fn format(&self) -> FormatOptions {
                FormatOptions::new(self.name()).unit($unit).precision(0)
            }
        }

        impl Metric for $metric {
            type Input = $input;

            fn name(&self) -> MetricName {
                Arc::new($name.to_owned())
            }

            fn description(&self) -> Option<String> {
                Some($description.to_owned())
            }

            fn attributes(&self) -> MetricAttributes {
                MetricAttributes::from(NumericAttributes {
                    unit: Some($unit.to_owned()),
                    higher_is_better: $higher_is_better,
                })
            }

            fn update(
                &mut self,
                item: &$input,
                _metadata: &MetricMetadata,
            ) -> Result<SerializedEntry, TensorReadError> {
                Ok(self.measure(item))
            }

            fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
                Ok(match self.value() {
                    None => SerializedEntry::not_available(Some($unit)),
                    Some(_) => self.state.compute_final(self.format()),
                })
            }

            fn clear(&mut self) {
                self.restart();
            }
        }

        impl Numeric for $metric {
            fn value(&self) -> Option<NumericEntry> {
                Some(self.state.current_value()).filter(|value| !value.current().is_nan())
            }

            fn running_value(&self) -> Option<NumericEntry> {
                self.value().map(|_| self.state.running_value())
            }

            fn final_value(&self) -> NumericEntry {
                self.state.final_value()
            }
        }
    };
}

/// Training tokens per second, from one update to the next. The mean of an epoch is its tokens over its time.
///
/// An epoch's first step starts the clock and has no value, so neither validation nor the compilation of kernels in
/// the first step counts. Register it after a metric that reads from the device, such as Burn's `LossMetric`:
/// otherwise it measures how fast the host submits work.
#[derive(Clone, Default)]
pub struct TokensPerSecond {
    /// Weighted by microseconds.
    state: NumericMetricState,
    last: Option<Instant>,
}

impl TokensPerSecond {
    /// A metric whose clock has not started.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn restart(&mut self) {
        *self = Self::new();
    }

    fn measure(&mut self, tokens: &TokenCount) -> SerializedEntry {
        self.step(tokens.0, Instant::now())
    }

    /// A step of `tokens` tokens that ended `now`.
    fn step(&mut self, tokens: usize, now: Instant) -> SerializedEntry {
        let value = self.last.replace(now).map(|before| {
            // Two updates at the same time give no rate; count at least a microsecond.
            let time = now.duration_since(before).max(Duration::from_micros(1));
            let micros = time.as_micros() as usize;
            (tokens as f64 * 1e6 / micros as f64, micros)
        });
        self.show(value)
    }
}

metric! {
    TokensPerSecond of TokenCount: "Throughput", "tokens/s", true,
    "Tokens that are trained on per second of wall clock"
}

/// Memory reserved by Burn's allocator on a device, free pages included, in MiB. An epoch's number is the mean over
/// its steps. Only CubeCL's backends report it; others have no value.
#[derive(Clone)]
pub struct DeviceMemory {
    device: Device,
    state: NumericMetricState,
}

impl DeviceMemory {
    /// The metric of a device.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            state: NumericMetricState::default(),
        }
    }

    fn restart(&mut self) {
        self.state.reset();
    }

    fn measure(&mut self, (): &()) -> SerializedEntry {
        let usage = self.device.memory_pool_usage();
        self.step(usage.map(|usage| usage.bytes_reserved))
    }

    /// A step after which this many bytes are reserved.
    fn step(&mut self, reserved: Option<u64>) -> SerializedEntry {
        self.show(reserved.map(|bytes| (bytes as f64 / f64::from(1 << 20), 1)))
    }
}

metric! {
    DeviceMemory of (): "Device memory", "MiB", false,
    "Memory that Burn's allocator has reserved on the device"
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
        // Time between epochs does not count.
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
        assert!(metric.measure(&()).is_not_available());
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
        assert_eq!(tensor.clone().sum().into_scalar::<f32>(), 1_048_576.0);
        metric.measure(&());
        assert!(shown(metric.value()) >= 4.0);
    }
}
