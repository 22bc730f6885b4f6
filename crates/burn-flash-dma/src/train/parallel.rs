//! Training on several devices.

use burn::tensor::Device;
use burn::train::{ExecutionStrategy, MultiDeviceOptim};

/// Burn's strategy for devices that share the texts of each step, and add their gradients up: `multi`, in which the first device reads
/// the gradients of the others, makes the step, and gives them its parameters; and `single` for one device.
///
/// The gradient is the *sum* over the devices: a loss is a device's share of the mean over all of them, as
/// `flash_dma_models::data::Loader` and its batches have it. Clip in `TrainStep::optimize`, by [`optimize`](super::optimize):
/// that is after the sum.
///
/// It is not `ddp`, which reduces between GPUs: in Burn 0.22.1 a training waits for ever once CUDA loads a kernel while a reduction is
/// under way (`docs/upstream.md`).
///
/// # Panics
///
/// If there is no device.
#[must_use]
pub fn data_parallel(devices: &[Device]) -> ExecutionStrategy {
    if let [device] = devices {
        return ExecutionStrategy::single(device.clone());
    }
    assert!(!devices.is_empty(), "no device to train on");
    ExecutionStrategy::multi(devices.to_vec(), MultiDeviceOptim::OptimMainDevice)
}
