//! Kernels that put the keys of a head into rank order: better score first, then lower index.

use cubecl::prelude::*;

/// Keys that a unit of [`sort_blocks_kernel`] compares.
pub(crate) const BLOCK: u32 = 32;

/// Sort key of a score that is never attended to (−∞).
pub(crate) const NEVER: u32 = 0;

/// Sort key of a NaN: below every number, above −∞.
const NAN: u32 = 1;

/// Maps a score to an integer of the same order: greater is better, −0 equals +0.
#[cube]
pub(crate) fn sort_key(score: f32) -> u32 {
    let bits = u32::reinterpret(score);
    let magnitude = bits & 0x7FFF_FFFFu32;
    // Flipping the negative numbers reverses their order; the sign bit then puts them below.
    let mut key = bits | 0x8000_0000u32;
    if bits > magnitude && magnitude > 0u32 {
        key = !bits;
    }
    if magnitude > 0x7F80_0000u32 {
        key = NAN;
    }
    if bits == 0xFF80_0000u32 {
        key = NEVER;
    }
    key
}

/// Sorts each block of [`BLOCK`] keys by counting: a key's rank is the number of better keys in its block.
///
/// One unit per key. `scores` is `[batch, kv_heads, n]` with any strides and a contiguous last axis; `keys` and `order`
/// are contiguous `[batch * kv_heads, n]`, overwritten with the sort keys and the key indices.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sort_blocks_kernel(
    scores: &Tensor<f32>,
    keys: &mut [u32],
    order: &mut [u32],
    rows: u32,
    n: u32,
) {
    let row = ABSOLUTE_POS / n as usize;
    if row < rows as usize {
        let i = (ABSOLUTE_POS % n as usize) as u32;
        let heads = scores.shape(1);
        let head = (row / heads) * scores.stride(0) + (row % heads) * scores.stride(1);
        let start = i / BLOCK * BLOCK;
        let end = min(start + BLOCK, n);
        let own = sort_key(scores[head + i as usize]);
        let mut rank = 0u32;
        for j in start..end {
            let other = sort_key(scores[head + j as usize]);
            if other > own || (other == own && j < i) {
                rank += 1u32;
            }
        }
        let target = row * n as usize + (start + rank) as usize;
        keys[target] = own;
        order[target] = i;
    }
}

/// Merges pairs of sorted blocks of `block` keys: a key's place in the merged block is its place in its own plus the
/// number of better keys in the sibling, found by bisection.
///
/// Blocks hold contiguous index ranges, so a tie goes to the key of the left block. One unit per key; all buffers are
/// contiguous `[rows, n]`, the `_out` buffers are overwritten.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn merge_blocks_kernel(
    keys: &[u32],
    order: &[u32],
    keys_out: &mut [u32],
    order_out: &mut [u32],
    rows: u32,
    n: u32,
    block: u32,
) {
    let row = ABSOLUTE_POS / n as usize;
    if row < rows as usize {
        let base = row * n as usize;
        let pos = (ABSOLUTE_POS - base) as u32;
        let own_start = pos - pos % block;
        let is_right = pos / block % 2u32 == 1u32;
        let own = keys[base + pos as usize];
        let left = own_start - block;
        let sibling = select(is_right, left, own_start + min(block, n - own_start));
        let mut low = sibling;
        let mut high = sibling + min(block, n - sibling);
        while low < high {
            let mid = low + (high - low) / 2u32;
            let other = keys[base + mid as usize];
            if other > own || (is_right && other == own) {
                low = mid + 1u32;
            } else {
                high = mid;
            }
        }
        let better = low - sibling;
        let mut target = pos + better;
        if is_right {
            target = pos - block + better;
        }
        keys_out[base + target as usize] = own;
        order_out[base + target as usize] = order[base + pos as usize];
    }
}
