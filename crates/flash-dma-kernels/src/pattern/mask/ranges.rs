//! A range of keys per query to a tile plan.

use crate::pattern::layout::first_bits;
use cubecl::prelude::*;
use flash_dma_problem::PlanGeometry;

/// Queries per block, and also the number of key blocks whose bits a unit writes, so that each of the units of a query
/// block counts one of these key blocks.
pub(crate) const QUERIES: usize = PlanGeometry::QUERY_BLOCK;

/// The keys that each query sees: query `i` sees `first <= j < end`. There may be one query for all.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeyRanges {
    /// `[batch, heads, queries, 1]` with any strides.
    pub first: OwnedTensor<i32>,
    /// Like `first`.
    pub end: OwnedTensor<i32>,
}

/// Sizes of a launch of [`ranges_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RangeSizes {
    /// Number of units.
    pub items: usize,
    /// Units per row of the mask and 16 key blocks, one per query: a multiple of 16.
    pub padded_queries: usize,
    pub q_len: usize,
    pub k_len: usize,
    /// The number added to a query's index to get its position.
    pub position_shift: i32,
}

/// Writes the bits of one query and 16 key blocks, and the count of one block, per unit; neighbouring units have
/// neighbouring queries. Unit `at` is query `at % sizes.padded_queries` of the key blocks from
/// `16 * (at / sizes.padded_queries % stretches)` on.
///
/// `ranges` are read; `bits` is the contiguous `[batch, heads, key_blocks, queries]` of pairs of words, `counts` the
/// contiguous `[batch, heads, query_blocks, key_blocks]`. There may be one query for all. The bits of blocks that
/// causal masking hides from all of their 16 queries are not written.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn ranges_kernel(
    ranges: &KeyRanges,
    bits: &mut Tensor<Vector<u32, Const<2>>>,
    counts: &mut Tensor<u32>,
    sizes: &RangeSizes,
    #[comptime] causal: bool,
    #[comptime] one_key: bool,
) {
    let (first, end) = (&ranges.first, &ranges.end);
    let (padded_queries, q_len, k_len) = (sizes.padded_queries, sizes.q_len, sizes.k_len);
    let position_shift = sizes.position_shift;
    let at = ABSOLUTE_POS;
    if at >= sizes.items {
        terminate!();
    }
    let (heads, query_blocks, key_blocks) = (counts.shape(1), counts.shape(2), counts.shape(3));
    let stretches = key_blocks.div_ceil(QUERIES);
    let query = at % padded_queries;
    let stretch = at / padded_queries % stretches;
    let row = at / padded_queries / stretches;
    let (batch, head) = (row / heads, row % heads);
    let from_first = batch * first.stride(0) + head * first.stride(1);
    let from_end = batch * end.stride(0) + head * end.stride(1);
    let queries = first.shape(2);
    let query_block = query / QUERIES;
    // One past the last key that some query of the block sees.
    let mut seen = k_len as i32;
    if comptime!(causal) {
        let last = min((query_block + 1) * QUERIES, q_len) as i32;
        seen = min(seen, last + position_shift);
    }

    if query < queries {
        let begin = max(first[from_first + query * first.stride(2)], 0i32);
        let stop = clamp(end[from_end + query * end.stride(2)], 0i32, k_len as i32);
        // One query for all is hidden from none.
        let reach = select(queries == 1, k_len as i32, max(seen, 0i32)) as usize;
        let first_block = stretch * QUERIES;
        let last_block = min(first_block + QUERIES, reach.div_ceil(64usize));
        let from = max(begin as usize, first_block * 64);
        let to = min(stop as usize, (first_block + QUERIES) * 64);
        if comptime!(one_key) {
            let all = select(begin < stop, 0xFFFF_FFFFu32, 0u32);
            bits[row * queries + query] = Vector::<u32, Const<2>>::new(all);
        } else if from < to {
            for block in first_block..last_block {
                let mut pair = Vector::<u32, Const<2>>::new(0u32);
                #[unroll]
                for w in 0..2usize {
                    let key = (block * 64) as i32 + comptime!(32 * w as i32);
                    pair.insert(w, first_bits(stop - key) & !first_bits(begin - key));
                }
                bits[(row * key_blocks + block) * queries + query] = pair;
            }
        } else {
            for block in first_block..last_block {
                let at = (row * key_blocks + block) * queries + query;
                bits[at] = Vector::<u32, Const<2>>::new(0u32);
            }
        }
    }

    let block = stretch * QUERIES + query % QUERIES;
    if block < key_blocks && query_block < query_blocks {
        let key = (block * 64) as i32;
        let last = key + min(k_len as i32 - key, 64i32);
        let mut count = 0i32;
        if key < seen {
            for n in 0..QUERIES {
                let query = query_block * QUERIES + n;
                // Past the last query, its range is read again and not counted.
                let stored = min(query, queries - 1);
                let begin = max(first[from_first + stored * first.stride(2)], key);
                let mut stop = min(end[from_end + stored * end.stride(2)], last);
                stop = select(query < q_len, stop, 0i32);
                if comptime!(causal) {
                    stop = min(stop, query as i32 + 1 + position_shift);
                }
                // In this order nothing overflows, whatever the tensors hold.
                count += max(stop, begin) - begin;
            }
        }
        counts[(row * query_blocks + query_block) * key_blocks + block] = count as u32;
    }
}
