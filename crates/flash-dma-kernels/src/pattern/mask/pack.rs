//! A mask of any shape and strides to its tile plan: bits, then counts.

use crate::pattern::layout::first_bits;
use crate::pattern::position::end_key;
use cubecl::prelude::*;

/// Writes one word of bits per unit: unit `at` writes word `at` of the contiguous `bits`
/// `[batch, heads, key_blocks, queries, 2]`.
///
/// `mask` is `[batch, heads, queries, keys]` with any strides. A nonzero element shows its key, or hides it if
/// `hidden`. If `causal`, words of keys that causal masking hides from their query are 0 and the mask is not read.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn pack_kernel<M: Int>(
    mask: &Tensor<M>,
    bits: &mut Tensor<u32>,
    words: usize,
    position_shift: i32,
    #[comptime] hidden: bool,
    #[comptime] causal: bool,
    #[comptime] one_key: bool,
    #[define(M)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at >= words {
        terminate!();
    }
    let (heads, blocks, queries) = (bits.shape(1), bits.shape(2), bits.shape(3));
    let (word, query, row) = (at % 2, at / 2 % queries, at / 2 / queries);
    let (block, head, batch) = (row % blocks, row / blocks % heads, row / blocks / heads);
    let first = block * 64 + word * 32;
    let base = batch * mask.stride(0) + head * mask.stride(1) + query * mask.stride(2);
    let keys = mask.shape(3);
    let mut value = 0u32;
    let mut visible = true;
    if comptime!(causal) {
        visible = first as i32 <= query as i32 + position_shift;
    }
    if comptime!(one_key) {
        if shows::<M>(mask[base], hidden) {
            value = u32::new(comptime!(u32::MAX as i64));
        }
    } else if visible && first < keys {
        let stride = mask.stride(3);
        for key in 0..min(keys - first, 32usize) {
            let shown = shows::<M>(mask[base + (first + key) * stride], hidden);
            value |= u32::cast_from(shown) << key as u32;
        }
    }
    bits[at] = value;
}

#[cube]
fn shows<M: Int>(element: M, #[comptime] hidden: bool) -> bool {
    let set = element != M::from_int(0);
    if comptime!(hidden) { !set } else { set }
}

/// Counts the visible pairs of one block per unit: unit `at` writes element `at` of the contiguous `counts`
/// `[batch, heads, query_blocks, key_blocks]`, from the `bits` of [`pack_kernel`].
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn count_kernel(
    bits: &Tensor<u32>,
    counts: &mut Tensor<u32>,
    items: usize,
    q_len: usize,
    k_len: usize,
    #[comptime] causal: bool,
) {
    let at = ABSOLUTE_POS;
    if at >= items {
        terminate!();
    }
    let (query_blocks, key_blocks) = (counts.shape(2), counts.shape(3));
    let (blocks, queries) = (bits.shape(2), bits.shape(3));
    let (key_block, query_block) = (at % key_blocks, at / key_blocks % query_blocks);
    let row = at / key_blocks / query_blocks;
    let first = query_block * 16;
    let mut count = 0u32;
    let last = min(first + 16, q_len);
    // Blocks that their last query does not see are not read.
    let mut seen = k_len;
    if comptime!(causal) {
        seen = max(end_key(last - 1, q_len, k_len, causal), 0i32) as usize;
    }
    if key_block * 64 < seen {
        let mut stored_block = key_block;
        if blocks == 1 {
            stored_block = 0usize;
        }
        for query in first..last {
            let mut stored = query;
            if queries == 1 {
                stored = 0usize;
            }
            let from = ((row * blocks + stored_block) * queries + stored) * 2;
            #[unroll]
            for word in 0..2usize {
                let first_key = (key_block * 64 + word * 32) as i32;
                let keys = first_bits(end_key(query, q_len, k_len, causal) - first_key);
                count += (bits[from + word] & keys).count_ones();
            }
        }
    }
    counts[at] = count;
}
