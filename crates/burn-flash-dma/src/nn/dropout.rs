//! The attention dropout of a layer: a seed for each of its calls.

use burn::module::{Flag, Module, Param};
use burn::tensor::{Device, Distribution, Tensor};
use flash_dma_problem::{AttentionError, Dropout};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Dropout that is active in training and draws another seed for each call.
#[derive(Module, Debug)]
pub(super) struct CallDropout {
    rate: f32,
    /// Burn's own training flag: `valid` and `freeze` clear it.
    training: Param<Flag>,
    #[module(skip)]
    seeds: Seeds,
}

impl CallDropout {
    /// Waits for the device.
    pub(super) fn try_new(rate: f64, device: &Device) -> Result<Self, AttentionError> {
        let rate = rate as f32;
        Dropout::new(rate, 0)?;
        Ok(Self {
            rate,
            training: Param::from_bool(true),
            seeds: Seeds::new(device),
        })
    }

    /// Dropout of a call on a device; `None` outside training.
    pub(super) fn draw(&self, device: &Device) -> Option<Dropout> {
        if !self.training.is_enabled() || !device.is_autodiff() {
            return None;
        }
        Some(Dropout::new(self.rate, self.seeds.draw()).expect("the rate was checked"))
    }
}

/// Source of the seeds of calls. Copies of a layer share it, so none of them repeats a mask.
#[derive(Clone, Debug)]
pub(super) struct Seeds(Arc<AtomicU64>);

impl Seeds {
    /// Seeds that follow from a random number of the device, and so from its [`seed`](Device::seed). Waits for the
    /// device.
    pub(super) fn new(device: &Device) -> Self {
        let uniform = Distribution::Uniform(0.0, f64::from(1u32 << 24));
        let words = Tensor::<1>::random([2], uniform, &device.clone().inner());
        let words = words.into_data();
        let first = (words.iter::<f64>()).fold(0, |seed, word| seed << 32 | word as u64);
        Self(Arc::new(AtomicU64::new(first)))
    }

    pub(super) fn draw(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}
