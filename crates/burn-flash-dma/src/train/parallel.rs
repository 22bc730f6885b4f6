//! Training on several devices.

use super::device_group::sends;
use burn::tensor::Device;
use burn::tensor::distributed::{DistributedConfig, ReduceOperation};
use burn::train::{ExecutionStrategy, MultiDeviceOptim};

/// Burn's strategy for devices that share the texts of each step, and add their gradients up: `ddp`, which reduces
/// between the devices, if these can (GPUs of NVIDIA with the library NCCL); else `multi`, which goes through the first
/// device; and `single` for one device.
///
/// The gradient is the *sum* over the devices, whichever it is: a loss is a device's share of the mean over all of them, as
/// `flash_dma_models::data::Loader` and its batches have it. Clip in `TrainStep::optimize`, by [`optimize`](super::optimize):
/// that is after the sum.
///
/// Under `ddp` every device must take as many steps, and call `backward` as often: Burn waits for the missing one without
/// an end. If a device's thread panics, so does the training, but the other devices' threads stay blocked, and only the end of
/// the process frees them.
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
    let differ = (1..devices.len()).all(|at| !devices[..at].contains(&devices[at]));
    if differ && devices.iter().all(sends) {
        let config = DistributedConfig {
            all_reduce_op: ReduceOperation::Sum,
        };
        return ExecutionStrategy::ddp(devices.to_vec(), config);
    }
    ExecutionStrategy::multi(devices.to_vec(), MultiDeviceOptim::OptimMainDevice)
}
