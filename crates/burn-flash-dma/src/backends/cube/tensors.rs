//! Tensors as the kernels take them, and what becomes of a failure.

use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::AttentionError;

/// The functions on `Tensor` have validated the call, so what fails is the device; it fails by name. What is known once
/// the kernels are queued: memory that ran out, kernels that did not compile or were refused.
///
/// # Panics
///
/// With the text of [`AttentionError::DeviceFailed`]. Under fusion that is an error of every read of the results.
pub(crate) fn run_checked<'a>(
    operation: &'static str,
    results: impl IntoIterator<Item = &'a CubeTensor>,
    result: Result<(), AttentionError>,
) {
    let mut results = results.into_iter().peekable();
    let client = results
        .peek()
        .expect("an operation has a result")
        .client
        .clone();
    let handles = results.map(|tensor| &tensor.handle);
    run(result.and_then(|()| flash_dma_kernels::check(&client, operation, handles)));
}

/// As [`run_checked`], for a step over a cache: it waits for nothing, not even for the kernels to be queued, so a device
/// that fails is reported by the read of what the step gives.
pub(crate) fn run(result: Result<(), AttentionError>) {
    result.unwrap_or_else(|error| panic!("{error}"));
}

/// Any strides but those of a last axis that is not contiguous, and of storage tiles: these copy.
pub(crate) fn addressable(tensor: CubeTensor) -> TensorBinding {
    let tensor = untile(tensor);
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let contiguous = match (shape.last(), strides.last()) {
        (Some(&size), Some(&stride)) => size <= 1 || stride == 1,
        _ => true,
    };
    if contiguous {
        tensor.binding()
    } else {
        into_contiguous(tensor).binding()
    }
}

/// A contiguous tensor beside `like`. (The plain allocation may pad its rows.)
pub(crate) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    empty_device_contiguous_dtype(client, device, shape.into(), dtype)
}
