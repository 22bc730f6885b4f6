//! A mask with a row for every query and an element for every key to its tile plan, in one pass.

use crate::pattern::layout::{first_bits, nonzero_bytes};
use cubecl::prelude::*;
use flash_dma_problem::PlanGeometry;

const QUERIES: usize = PlanGeometry::QUERY_BLOCK;
/// Stride in words between key blocks in shared memory: odd, so that neighbours use different banks.
const STRIDE: usize = 2 * QUERIES + 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowsBlueprint {
    /// Units per cube: two per key block.
    pub units: usize,
    /// Bytes of an element of the mask: 1 or 4.
    pub size: usize,
    /// True if a nonzero element hides its key.
    pub hidden: bool,
    pub causal: bool,
    /// True if every 32 elements begin at a multiple of four words, so that these are read at once; otherwise singly.
    pub aligned: bool,
}

impl RowsBlueprint {
    pub(crate) fn blocks(&self) -> usize {
        self.units / 2
    }

    /// Reads that cover 32 elements. Unaligned elements of one byte span nine words.
    fn reads(&self) -> usize {
        match (self.aligned, self.size) {
            (true, size) => 2 * size,
            (false, 1) => 9,
            (false, _) => 32,
        }
    }

    /// Rows that a unit reads at once, so that the reads overlap.
    fn rows_at_once(&self) -> usize {
        match (self.aligned, self.size) {
            (true, 1) => 4,
            (false, 1) => 2,
            _ => 1,
        }
    }
}

/// Sizes of a launch of [`rows_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RowsSizes {
    /// Cubes with work.
    pub cubes: usize,
    pub q_len: usize,
    pub k_len: usize,
    /// The position of query 0.
    pub position_shift: i32,
    /// The last word of the mask that may be read.
    pub last_word: usize,
}

/// Packs and counts `units / 2` key blocks of one block of 16 queries per cube. Unit `u` packs word `u % 2` of the
/// cube's key block `u / 2` for every query, and counts the bits that causal masking leaves; shared memory transposes
/// the words, so that the reads are whole pieces of rows and the writes whole lines of bits.
///
/// `mask` holds the 32-bit words, the last of them `last_word`, of elements `[batch, heads, queries, keys]` with a
/// contiguous last axis, whose strides it has. `bits` is the contiguous `[batch, heads, key_blocks, queries]` of pairs
/// of words, `counts` the contiguous `[batch, heads, query_blocks, key_blocks]`. Blocks that causal masking hides from
/// all 16 queries are not read, and their bits are not written.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn rows_kernel<N: Size>(
    mask: &Tensor<Vector<u32, N>>,
    bits: &mut Tensor<Vector<u32, Const<2>>>,
    counts: &mut Tensor<u32>,
    sizes: &RowsSizes,
    #[comptime] bp: RowsBlueprint,
) {
    let (q_len, k_len) = (sizes.q_len, sizes.k_len);
    if CUBE_POS >= sizes.cubes {
        terminate!();
    }
    let mut words = Shared::<[u32]>::new_slice(comptime!(bp.blocks() * STRIDE));
    let mut sums = Shared::<[u32]>::new_slice(bp.units);
    let unit = UNIT_POS as usize;
    let (query_blocks, key_blocks) = (counts.shape(2), counts.shape(3));
    let groups = key_blocks.div_ceil(comptime!(bp.blocks()));
    let (group, tile) = (CUBE_POS % groups, CUBE_POS / groups);
    let (query_block, row) = (tile % query_blocks, tile / query_blocks);
    let first_query = query_block * QUERIES;
    let queries = min(q_len - first_query, QUERIES);
    let first_block = group * comptime!(bp.blocks());
    let first_key = (first_block + unit / 2) * 64 + unit % 2 * 32;

    // One past the last key block that some query sees.
    let mut seen_blocks = key_blocks as i32;
    if comptime!(bp.causal) {
        let position = (first_query + queries - 1) as i32 + sizes.position_shift;
        seen_blocks = min(seen_blocks, select(position < 0, 0i32, position / 64 + 1));
    }
    let at = unit / 2 * STRIDE + unit % 2;
    let mut count = 0u32;
    if first_key < k_len && ((first_block + unit / 2) as i32) < seen_blocks {
        let heads = counts.shape(1);
        let base = row / heads * mask.stride(0)
            + row % heads * mask.stride(1)
            + first_query * mask.stride(2)
            + first_key;
        let step = mask.stride(2);
        let reads = comptime!(bp.reads());
        let at_once = comptime!(bp.rows_at_once());
        for part in 0..comptime!(QUERIES / bp.rows_at_once()) {
            let mut loaded =
                Array::<Vector<u32, N>>::new(comptime!(bp.rows_at_once() * bp.reads()));
            #[unroll]
            for r in 0..at_once {
                // Past the last query, its row is read again and not counted.
                let from = base + min(part * at_once + r, queries - 1) * step;
                let first = from
                    / comptime!(if bp.aligned {
                        16 / bp.size
                    } else {
                        4 / bp.size
                    });
                #[unroll]
                for n in 0..reads {
                    if comptime!(bp.aligned) {
                        loaded[comptime!(r * reads + n)] = mask[first + n];
                    } else {
                        loaded[comptime!(r * reads + n)] = mask[min(first + n, sizes.last_word)];
                    }
                }
            }
            #[unroll]
            for r in 0..at_once {
                let query = part * at_once + r;
                let from = base + min(query, queries - 1) * step;
                let mut word = 0u32;
                #[unroll]
                for n in 0..comptime!(8 * bp.size) {
                    let at = comptime!(if bp.aligned {
                        (r * reads + n / 4, n % 4)
                    } else {
                        (r * reads + n, 0)
                    });
                    let mut element = loaded[comptime!(at.0)].extract(comptime!(at.1));
                    if comptime!(bp.size == 1) {
                        if comptime!(!bp.aligned) {
                            // Four bytes that begin `from % 4` bytes after the start of a word; avoids a shift by 32.
                            let next = loaded[comptime!(r * reads + n + 1)].extract(0usize);
                            let shift = (from % 4) as u32 * 8u32;
                            element = (element >> shift) | ((next << (24u32 - shift)) << 8u32);
                        }
                        word |= nonzero_bytes(element) << comptime!(4 * n as u32);
                    } else {
                        word |= u32::cast_from(element != 0u32) << comptime!(n as u32);
                    }
                }
                if comptime!(bp.hidden) {
                    word = !word;
                }
                if comptime!(!bp.aligned) {
                    // After a row lies the next one.
                    word &= first_bits((k_len - first_key) as i32);
                }
                words[at + 2 * query] = word;
                let mut seen = select(query < queries, 32i32, 0i32);
                if comptime!(bp.causal) {
                    let position = (first_query + query) as i32 + sizes.position_shift;
                    seen = min(seen, position + 1 - first_key as i32);
                }
                count += (word & first_bits(seen)).count_ones();
            }
        }
    } else {
        for query in 0..QUERIES {
            words[at + 2 * query] = 0u32;
        }
    }
    sums[unit] = count;
    sync_cube();

    for part in 0..comptime!(QUERIES / 2) {
        let item = part * bp.units + unit;
        let (block, query) = (item / QUERIES, item % QUERIES);
        if ((first_block + block) as i32) < seen_blocks && query < queries {
            let from = block * STRIDE + 2 * query;
            let mut pair = Vector::<u32, Const<2>>::new(words[from]);
            pair.insert(1usize, words[from + 1]);
            bits[(row * key_blocks + first_block + block) * q_len + first_query + query] = pair;
        }
    }
    if unit < comptime!(bp.blocks()) && first_block + unit < key_blocks {
        counts[tile * key_blocks + first_block + unit] = sums[2 * unit] + sums[2 * unit + 1];
    }
}
