//! ALiBi on the device: the slopes, and the addition to a logit.

use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// ALiBi slopes, `[q_heads]`; given exactly if the problem has them.
pub(crate) type AlibiArg = ComptimeOption<OwnedTensor<f32>>;

/// A problem's slopes in a new buffer, `[q_heads]`.
pub(crate) fn slopes(client: &Client, problem: &Problem) -> Option<TensorBinding> {
    let slopes = problem.alibi?.values();
    let handle = client.create_from_slice(f32::as_bytes(slopes));
    #[cfg(feature = "internals")]
    crate::host::peak::observe(client, &handle, size_of_val(slopes));
    // SAFETY: the buffer holds the slopes.
    Some(unsafe { TensorBinding::from_raw_parts(handle, [1].into(), [slopes.len()].into()) })
}

/// ALiBi of a row of queries: the slope of its head, and its place among the keys.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct AlibiRow {
    pub slope: f32,
    /// Counted from the same token as the places of keys.
    pub place: f32,
}

/// Adds ALiBi, if there is any, to a logit (or a part of it) of the key at `key`.
#[cube]
pub(crate) fn biased(row: &ComptimeOption<AlibiRow>, logit: f32, key: f32) -> f32 {
    #[comptime]
    match row {
        ComptimeOption::Some(row) => row.biased(logit, key),
        ComptimeOption::None => logit,
    }
}

#[cube]
impl AlibiRow {
    /// Adds ALiBi to a logit (or a part of it) of the key at `key`.
    pub(crate) fn biased(&self, logit: f32, key: f32) -> f32 {
        fma(-self.slope, (self.place - key).abs(), logit)
    }
}
