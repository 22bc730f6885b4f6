//! Transfers of tensors between devices.

#[cfg(feature = "cube")]
use crate::memory::client;
#[cfg(feature = "cube")]
use burn::backend::DispatchDevice;
use burn::tensor::{Device, Tensor, kind::Basic};
#[cfg(feature = "cube")]
use cubecl::{
    ir::{ElemType, FloatKind},
    server::ReduceOperation,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Transfers are queued one at a time: two devices that sent to each other in different orders would wait for ever.
#[derive(Clone, Default)]
pub(super) struct Transfers(Arc<Mutex<()>>);

impl Transfers {
    pub(super) fn begin(&self) -> MutexGuard<'_, ()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A tensor on another device: `to_device`, between this thread's work before it and behind it on both devices.
///
/// CubeCL orders a transfer behind the work that makes the tensor, and in front of the work that reads the copy. But it gives memory
/// away as soon as its tensor is dropped: the copy's memory may still be read by earlier work, and the tensor's, once it is dropped,
/// be written by later.
pub fn send<const D: usize, K: Basic>(tensor: Tensor<D, K>, to: &Device) -> Tensor<D, K> {
    let from = tensor.device();
    if from == *to || !(sends(&from) && sends(to)) {
        return tensor.to_device(to);
    }
    transfers_wait(to);
    let tensor = tensor.to_device(to);
    wait_for_transfers(&from);
    tensor
}

/// True if a device sends to others itself.
#[cfg(feature = "cube")]
pub(super) fn sends(device: &Device) -> bool {
    client(device).is_ok_and(|client| client.has_device_transport())
}

/// Has later transfers from and to a device wait for this thread's work on it.
#[cfg(feature = "cube")]
fn transfers_wait(device: &Device) {
    // A reduction over one device: CubeCL has no call that only waits.
    let mut client = client(device).expect("a device that is sent to has a client");
    let group = match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(device) => vec![device.to_id()],
        // It is the only kind in some builds.
        #[allow(unreachable_patterns)]
        _ => unreachable!("it has a client"),
    };
    let (number, element) = (client.empty(4), ElemType::Float(FloatKind::F32));
    client.all_reduce(number.clone(), number, element, group, ReduceOperation::Sum);
}

/// Has this thread's later work on a device wait for its transfers.
#[cfg(feature = "cube")]
fn wait_for_transfers(device: &Device) {
    let client = client(device).expect("a device that sends has a client");
    client.sync_collective();
}

#[cfg(not(feature = "cube"))]
pub(super) fn sends(_: &Device) -> bool {
    false
}

#[cfg(not(feature = "cube"))]
fn transfers_wait(_: &Device) {}

#[cfg(not(feature = "cube"))]
fn wait_for_transfers(_: &Device) {}
