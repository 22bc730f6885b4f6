//! The report of a device's failures.
//!
//! CubeCL notes a failed launch on its output buffers, skips every launch that reads one of them and propagates the
//! note; a read of a buffer with a note is an error. It drops the note when another launch writes the buffer, even if
//! that launch writes another part of it: [`Seal`] preserves it.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use flash_dma_problem::AttentionError;

/// Checks that every launch that wrote `results` so far could be queued: memory was allocated, and kernels compiled and
/// were accepted. `operation` names the writer, for the error.
///
/// It waits until the launches are queued, not until they have run: a later fault of a kernel, an illegal address for
/// example, is an error of `client.sync()` and of the next read.
///
/// # Errors
///
/// [`AttentionError::DeviceFailed`]; the content of `results` is then undefined, and reading it is an error, too.
pub fn check<'a>(
    client: &Client,
    operation: &'static str,
    results: impl IntoIterator<Item = &'a Handle>,
) -> Result<(), AttentionError> {
    let failed = |reason| AttentionError::DeviceFailed { operation, reason };
    (client.check(results)).map_err(|error| failed(error.to_string()))
}

/// Makes `token` depend on `result`, so that it inherits its note: both are read.
#[cube(launch_unchecked)]
fn note_kernel(result: &[u32], token: &mut [u32]) {
    if ABSOLUTE_POS == 0 {
        token[0] ^= result[0];
    }
}

/// Makes `result` depend on `token`, but changes nothing: `never` is 0.
#[cube(launch_unchecked)]
fn close_kernel(token: &[u32], never: u32, result: &mut [u32]) {
    if ABSOLUTE_POS == 0 && never != 0 {
        result[0] = token[0];
    }
}

/// Keeps the failures of launches that write a result in parts: [`note`](Self::note) after each of them, and
/// [`close`](Self::close) after the last. It takes two launches of one unit, and no message to the host.
pub(crate) struct Seal<'a> {
    client: &'a Client,
    token: TensorBinding,
}

impl<'a> Seal<'a> {
    pub(crate) fn new(client: &'a Client) -> Self {
        let handle = client.create_from_slice(&[0; 4]);
        // SAFETY: the buffer holds the one word of the shape.
        let token = unsafe { TensorBinding::from_raw_parts(handle, [1].into(), [1usize].into()) };
        Self { client, token }
    }

    /// Records whether the launches so far have failed to write `result`, which holds at least 4 bytes.
    pub(crate) fn note(&self, result: &TensorBinding) {
        // SAFETY: the kernel reads one word of the result, and reads and writes that of the token.
        unsafe {
            note_kernel::launch_unchecked(
                self.client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(1),
                result.clone().into_buffer_arg(),
                self.token.clone().into_buffer_arg(),
            );
        }
    }

    /// Passes the recorded failure on to `result`.
    pub(crate) fn close(&self, result: &TensorBinding) {
        // SAFETY: the kernel writes nothing.
        unsafe {
            close_kernel::launch_unchecked(
                self.client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(1),
                self.token.clone().into_buffer_arg(),
                0,
                result.clone().into_buffer_arg(),
            );
        }
    }
}

#[cfg(test)]
mod tests;
