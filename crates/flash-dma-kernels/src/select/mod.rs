//! Scores to intervals: exact for any window, parallel over heads and keys.
//!
//! Order a head's keys by (score descending, index ascending); key `j` has rank `r`. It is evicted at
//! the position where the `window`-th better key becomes visible: the `window`-th smallest index among
//! the first `r` keys of that order. If that index is less than `j` the key is never attended to; if
//! `r < window` it is never evicted. Keys of score −∞ rank last, so no key counts them.
//!
//! There are two methods. **By blocks** ([`blocks`]), on GPUs, for rows of up to 512K keys: the keys attended at
//! position `p` are those no worse than the `window`-th best of the first `p + 1` keys, and this threshold only rises.
//!
//! 1. [`thresholds`]: the threshold at the edges of blocks of positions, each by a radix selection over the
//!    keys before it;
//! 2. [`evictions`]: the keys that are evicted within each block.
//!
//! This takes two launches, O(n² / block) reads of scores and 3 words of scratch per edge.
//!
//! **By sorting** ([`launch`]), for longer rows and where units are threads of a processor:
//!
//! 1. [`sort`]: sort keys and blocks of 32 by counting, then a merge sort by bisection;
//! 2. [`quantile`]: a wavelet tree over the order, built and descended by all queries one level at a time, with digits
//!    of up to 4 bits, down to nodes of 64 indices that are searched directly.
//!
//! For `n` keys this takes `3 + ceil(log2(n / 32)) + 3 * ceil((ceil(log2 n) - 6) / 4)` launches (30 for 1M), O(n log n)
//! work, and 7.3 words of scratch per key: order and sort key, twice each, three words of query state, and the digit
//! counts of one level (`16 / 64 + 16 / 1024`).
//!
//! Neither waits for the host, and a window that evicts nothing takes one launch. With recent keys all of this is about
//! the older keys: a key competes only when it is no longer recent, so that every end is that many positions later.

pub(crate) mod blocks;
pub(crate) mod blueprint;
pub(crate) mod digits;
pub(crate) mod evictions;
pub(crate) mod launch;
pub(crate) mod quantile;
pub(crate) mod sort;
#[cfg(test)]
mod tests;
pub(crate) mod thresholds;

use crate::host::check::{Layout, check_tensor};
use crate::host::range::range;
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, KeptKeys, TensorName};

/// Selects the keys: writes the [`Interval`](flash_dma_problem::Interval) of every key.
///
/// `scores` is `[batch, kv_heads, k_len]`, f32, of any strides with a contiguous last axis; `intervals` is contiguous
/// `[batch, kv_heads, k_len, 2]` of 32-bit integers and is overwritten. A position keeps the keys of `kept`, none with
/// a score of −∞ for its rank; if `kept.best` is `k_len` or more, it keeps all other keys.
///
/// The call only enqueues: a failure on the device is reported when the intervals are read.
///
/// # Errors
///
/// [`AttentionError`], before any launch, if no key is kept, a tensor does not fit, or `k_len` exceeds `i32::MAX`.
pub fn select(
    client: &Client,
    scores: TensorBinding,
    kept: impl Into<KeptKeys>,
    intervals: TensorBinding,
) -> Result<(), AttentionError> {
    let kept = kept.into();
    kept.check()?;
    let [batch, heads, k_len] = scores.shape[..] else {
        return Err(AttentionError::Rank {
            tensor: TensorName::Scores,
            expected: 3,
            actual: scores.shape.len(),
        });
    };
    for (what, size, limit) in [
        ("the number of keys", k_len, i32::MAX as usize),
        ("the number of heads", batch * heads, u32::MAX as usize),
    ] {
        if size > limit {
            return Err(AttentionError::TooLarge { what, size, limit });
        }
    }
    let (keys, pairs) = ([batch, heads, k_len], [batch, heads, k_len, 2]);
    check_tensor(TensorName::Scores, &scores, &keys, 4, Layout::Strided)?;
    let whole = Layout::Contiguous;
    check_tensor(TensorName::Intervals, &intervals, &pairs, 4, whole)?;
    let _range = range!("select");
    launch::launch(client, scores, kept, intervals);
    Ok(())
}

/// The bytes that [`select`] allocates on the device for scores `[batch, kv_heads, k_len]`, known before it is called:
/// the peak total of the buffers that it holds at once, each at its requested size, without its arguments.
#[must_use]
pub fn select_workspace(
    client: &Client,
    [batch, heads, k_len]: [usize; 3],
    kept: impl Into<KeptKeys>,
) -> usize {
    launch::workspace(client, batch * heads, k_len, kept.into())
}
