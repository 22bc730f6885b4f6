//! The device memory that attention needs, and the largest problem that fits, known before anything is allocated.
//!
//! ```
//! # #[cfg(feature = "cpu")] {
//! use burn::tensor::Device;
//! use burn_flash_dma::memory::{Passes, longest};
//! use burn_flash_dma::{AttentionOptions, ElementType, Problem};
//!
//! // 16 query heads of 64 features over 4 kv heads; the lengths are to be found.
//! let (q, kv) = ([1, 16, 1, 64], [1, 4, 1, 64]);
//! let options = AttentionOptions::new().with_keep_window(1024);
//! let layer = Problem::new(&q, &kv, &kv, Some(&kv[..3]), ElementType::F32, &options)?;
//!
//! let passes = Passes::ForwardAndBackward;
//! let tokens = longest(&layer, passes, 8 << 30, &Device::cpu())?;
//! assert!(tokens > 100_000);
//! # }
//! # Ok::<(), burn_flash_dma::AttentionError>(())
//! ```
//!
//! All numbers are for one attention call: its tensors, contiguous and held at once, and the workspace of the engine.
//! Between the passes autodiff keeps the [tensors of the forward pass](tensor_bytes): `q`, `k`, `v`, the scores, two
//! integers per key, `out`, the LSE and its rounding error. [`Passes::ForwardAndBackward`] also counts the residual
//! of `out` in 16 bits, as large as `out`, and [`Passes::WithRunnersUp`] one more integer per key (two if kept keys
//! are [left out](crate::Selector::leave_one_out) as well).

pub use flash_dma_problem::memory::{Passes, tensor_bytes};

#[cfg(feature = "cube")]
use burn::backend::DispatchDevice;
use burn::tensor::Device;
use flash_dma_problem::{AttentionError, Problem};

/// Bytes that the passes of a problem need on a device: its [tensors](tensor_bytes), and the largest workspace of the
/// selection or a pass. A backend's pool rounds buffer sizes up and may hold more.
///
/// # Errors
///
/// [`AttentionError::Unsupported`] if the device is not one of CubeCL's: other engines have no such number. Any other
/// error with which attention would refuse the problem there.
pub fn required_bytes(
    problem: &Problem,
    passes: Passes,
    device: &Device,
) -> Result<usize, AttentionError> {
    #[cfg(feature = "cube")]
    return flash_dma_kernels::required_bytes(&client(device)?, problem, passes);
    #[cfg(not(feature = "cube"))]
    {
        let _ = (problem, passes);
        Err(unknown(device))
    }
}

/// Number of tokens of the longest sequences that fit into `bytes` of a device's memory, by [`required_bytes`]:
/// `problem` with as many queries as keys. 0 if not even one token fits. Only arithmetic on the host.
///
/// The result fits, and one token more does not. An engine may make fewer lists and parts of a larger problem, so
/// some greater length may fit again.
///
/// # Errors
///
/// See [`required_bytes`].
pub fn longest(
    problem: &Problem,
    passes: Passes,
    bytes: usize,
    device: &Device,
) -> Result<usize, AttentionError> {
    #[cfg(feature = "cube")]
    return flash_dma_kernels::longest(&client(device)?, problem, passes, bytes);
    #[cfg(not(feature = "cube"))]
    {
        let _ = (problem, passes, bytes);
        Err(unknown(device))
    }
}

/// Largest number of sequences, each as long as those of `problem`, that fits into `bytes` of a device's memory, by
/// [`required_bytes`]. 0 if not even one fits. The result is as in [`longest`].
///
/// # Errors
///
/// See [`required_bytes`].
pub fn largest_batch(
    problem: &Problem,
    passes: Passes,
    bytes: usize,
    device: &Device,
) -> Result<usize, AttentionError> {
    #[cfg(feature = "cube")]
    return flash_dma_kernels::largest_batch(&client(device)?, problem, passes, bytes);
    #[cfg(not(feature = "cube"))]
    {
        let _ = (problem, passes, bytes);
        Err(unknown(device))
    }
}

/// Client of a CubeCL device, under autodiff or not.
#[cfg(feature = "cube")]
pub(crate) fn client(device: &Device) -> Result<cubecl::client::Client, AttentionError> {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(device) => Ok(device.client()),
        // It is the only kind in some builds.
        #[allow(unreachable_patterns)]
        _ => Err(unknown(device)),
    }
}

fn unknown(device: &Device) -> AttentionError {
    AttentionError::Unsupported {
        what: format!("a workspace that is known before the call on {device:?}"),
    }
}
