//! Kernels that drop the keys no position attends to.

use cubecl::prelude::*;

/// Keys that one unit of [`count_live_kernel`] counts.
pub(super) const CHUNK: u32 = 128;

/// Whether some position attends to `key`, from contiguous `[rows, n, 2]` intervals.
#[cube]
fn is_live(intervals: &[u32], base: usize, key: u32) -> bool {
    intervals[(base + key as usize) * 2 + 1] > key
}

/// Counts the live keys of each chunk.
///
/// One unit a (row, chunk). `intervals` is contiguous `[rows, n, 2]`; `counts` `[rows, chunks]` is
/// overwritten.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn count_live_kernel(intervals: &[u32], counts: &mut [u32], rows: u32, n: u32) {
    let chunks = n.div_ceil(CHUNK);
    let row = ABSOLUTE_POS / chunks as usize;
    if row < rows as usize {
        let start = (ABSOLUTE_POS % chunks as usize) as u32 * CHUNK;
        let base = row * n as usize;
        let mut count = 0u32;
        for key in start..min(start + CHUNK, n) {
            if is_live(intervals, base, key) {
                count += 1u32;
            }
        }
        counts[ABSOLUTE_POS] = count;
    }
}

/// Turns the counts of chunks, `[rows, chunks]`, into those before the chunk, in place, and
/// overwrites `totals` `[rows]` with their sums. One unit a row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn scan_live_kernel(counts: &mut [u32], totals: &mut [u32], rows: u32, chunks: u32) {
    if ABSOLUTE_POS < rows as usize {
        let base = ABSOLUTE_POS * chunks as usize;
        let mut sum = 0u32;
        for chunk in 0..chunks {
            let slot = base + chunk as usize;
            let count = counts[slot];
            counts[slot] = sum;
            sum += count;
        }
        totals[ABSOLUTE_POS] = sum;
    }
}

/// Moves every live key behind the live keys before it.
///
/// One unit a key. `intervals` is contiguous `[rows, n, 2]`, `before` `[rows, chunks]` the live keys
/// before each chunk; the beginnings of the rows of `keys` and `ends`, `[rows, n]`, are overwritten.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn write_live_kernel(
    intervals: &[u32],
    before: &[u32],
    keys: &mut [u32],
    ends: &mut [u32],
    rows: u32,
    n: u32,
) {
    let row = ABSOLUTE_POS / n as usize;
    if row < rows as usize {
        let base = row * n as usize;
        let key = (ABSOLUTE_POS - base) as u32;
        if is_live(intervals, base, key) {
            let chunk = key / CHUNK;
            let mut place = before[row * n.div_ceil(CHUNK) as usize + chunk as usize];
            for other in chunk * CHUNK..key {
                if is_live(intervals, base, other) {
                    place += 1u32;
                }
            }
            keys[base + place as usize] = key;
            ends[base + place as usize] = intervals[ABSOLUTE_POS * 2 + 1];
        }
    }
}
