//! Tensors as the kernels take them, and the report of a failure.

use crate::ops::scores::FEW_TOKENS;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, EngineChoice};
use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Calls of an operation with results of the same shapes and types that are checked, on each thread. A check makes the host
/// wait for the device's queue, which takes half of the time of a small model's step; what does not compile, or has no
/// memory, does so in the first steps.
const CHECKED_CALLS: u32 = 32;

/// Kinds of calls to count. With more of them, as of texts of ever new lengths, counting begins again.
const COUNTED_KINDS: usize = 1 << 16;

thread_local! {
    /// Calls so far, by a hash of the operation and its results.
    static CALLS: RefCell<HashMap<u64, u32>> = RefCell::default();
}

/// Reports a failure of the device, the only one possible after the validation on `Tensor`, under the operation's
/// name. Known once the kernels are queued: exhausted memory, and kernels that did not compile or were refused. After the
/// first [`CHECKED_CALLS`] it is [`run`].
///
/// # Panics
///
/// With the text of [`AttentionError::DeviceFailed`]. Under fusion every read of the results is that error.
pub(crate) fn run_checked<'a>(
    operation: &'static str,
    results: impl IntoIterator<Item = &'a CubeTensor>,
    result: Result<(), AttentionError>,
) {
    let results: Vec<&CubeTensor> = results.into_iter().collect();
    if result.is_err() || !is_checked(operation, &results) {
        return run(result);
    }
    let client = &results[0].client;
    let handles = results.iter().map(|tensor| &tensor.handle);
    run(flash_dma_kernels::check(client, operation, handles));
}

/// Counts the call.
fn is_checked(operation: &'static str, results: &[&CubeTensor]) -> bool {
    let mut kind = DefaultHasher::new();
    (operation, &results[0].device).hash(&mut kind);
    for tensor in results {
        (tensor.meta.shape(), tensor.dtype).hash(&mut kind);
    }
    CALLS.with_borrow_mut(|calls| {
        if calls.len() == COUNTED_KINDS {
            calls.clear();
        }
        let count = calls.entry(kind.finish()).or_default();
        *count += 1;
        *count <= CHECKED_CALLS
    })
}

/// [`run_checked`] without the check, for the kernels of a decoded token: waits for nothing, not even for them to be
/// queued. CubeCL passes a failed launch on to everything computed from its result, and reading that reports it.
pub(crate) fn run(result: Result<(), AttentionError>) {
    result.unwrap_or_else(|error| panic!("{error}"));
}

/// [`run_checked`] for an operation over `tokens`, or [`run`] if they are so few that they may be those of a step over a
/// cache.
pub(crate) fn run_over(
    tokens: usize,
    operation: &'static str,
    out: &CubeTensor,
    result: Result<(), AttentionError>,
) {
    match tokens <= FEW_TOKENS {
        true => run(result),
        false => run_checked(operation, [out], result),
    }
}

/// Binding of a tensor with any strides. A last axis that is not contiguous, or tiled storage, is copied first.
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

/// [`addressable`] for the rows of a call. If the call asks for an engine, rows that tensor cores cannot read (not at
/// multiples of 16 bytes, or repeated) are copied.
pub(crate) fn rows(choice: EngineChoice, tensor: CubeTensor) -> TensorBinding {
    let size = tensor.dtype.size();
    let axes = tensor.meta.shape().iter().zip(tensor.meta.strides().iter());
    let unread = axes.rev().skip(1).any(|(&len, &stride)| {
        let bytes = stride * size;
        len > 1 && (bytes == 0 || !bytes.is_multiple_of(16))
    });
    if matches!(choice, EngineChoice::Only(_)) && unread {
        into_contiguous(untile(tensor)).binding()
    } else {
        addressable(tensor)
    }
}

/// A contiguous tensor on the device of `like`. (Burn's plain allocation may pad rows.)
pub(crate) fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    empty_device_contiguous_dtype(client, device, shape.into(), dtype)
}
