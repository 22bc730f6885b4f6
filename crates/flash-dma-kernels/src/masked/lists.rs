//! What a tile of queries sees, listed for the tensor-core kernels: key blocks, or single keys where that is shorter.

use super::args::MaskBits;
use super::gather::{launch_gather, mark_not_finite};
use super::seen::prefix;
use crate::forward::mma::{HEADER, KEY_BLOCK, TILE_WORDS};
use crate::scratch::{address_type, cubes, one_unit_each, scratch};
use crate::team::{Member, Team, sum_of, sum_up_to};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{ElementType, PlanGeometry};

/// Keys are gathered one by one if a tile's queries together see at most so many of 4 keys of the blocks that they see
/// something of: a step of gathered keys costs a little more than one of a block, and the bits are packed anew.
const GATHERED_OF_4: u32 = 3;

/// A gathered list has room for a part of all keys: one of so many.
const GATHERED_PART: usize = 2;

/// What each query tile sees, for every row of the mask, as [`mask`](crate::forward::mma) says.
#[derive(Clone, Debug)]
pub(crate) struct TileLists {
    /// `[batch, heads, tiles, capacity]` of the mask, u32; past a list's end undefined.
    pub list: TensorBinding,
    /// [`HEADER`] words, then `[batch, heads, tiles, TILE_WORDS]`, u32.
    pub counts: TensorBinding,
}

/// Sizes of the lists of one call.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// Tiles of a row of the mask, and of all rows.
    pub tiles: usize,
    pub items: usize,
    /// Queries of a tile.
    pub queries: usize,
    /// Key blocks.
    pub blocks: usize,
    /// Keys that a gathered list has room for, in whole steps: where its bits begin.
    pub room: usize,
}

impl Sizes {
    fn new(geometry: &PlanGeometry, queries: usize, gather: bool) -> Self {
        let [batch, heads, _, blocks] = geometry.counts_shape();
        let tiles = geometry.q_len.div_ceil(queries);
        Self {
            tiles,
            items: batch * heads * tiles,
            queries,
            blocks,
            room: if gather {
                (geometry.k_len / GATHERED_PART).next_multiple_of(KEY_BLOCK)
            } else {
                0
            },
        }
    }

    /// Words of a list: blocks, or keys and their bits, which are read in pairs.
    pub(super) fn capacity(&self) -> usize {
        let gathered = self.room + self.room / 32 * self.queries;
        self.blocks.max(gathered).next_multiple_of(2)
    }
}

/// Lists what tiles of `queries` queries see, in four launches. `watched` is k or v, `[batch, kv_heads, k_len, head_dim]`
/// in chunks of 16 bytes, of which the header says whether all values are finite. Without `gather` all lists are of
/// blocks.
///
/// Memory: about half of the bits of a plan that broadcasts no queries, and 16 bytes a tile and key block.
pub(crate) fn tile_lists(
    client: &Client,
    geometry: &PlanGeometry,
    plan: &MaskBits,
    queries: usize,
    watched: &TensorBinding,
    element: ElementType,
    gather: bool,
) -> TileLists {
    let [batch, heads, ..] = geometry.counts_shape();
    let [_, _, bit_blocks, bit_queries, _] = geometry.bits_shape();
    let sizes = Sizes::new(geometry, queries, gather);
    let list = scratch(client, [batch, heads, sizes.tiles, sizes.capacity()]);
    let counts = scratch(client, [HEADER + sizes.items * TILE_WORDS]);
    let spans = scratch(client, [sizes.items * sizes.blocks, 4]);
    let address = address_type([&plan.bits, &plan.counts, &list, &counts, &spans]);
    let (grid, dim) = one_unit_each(client, sizes.items * sizes.blocks);
    // SAFETY: units past the blocks return; the plan was checked to have the geometry's shapes.
    unsafe {
        span_kernel::launch_unchecked(
            client,
            grid,
            dim,
            address,
            plan.bits.clone().into_buffer_arg(),
            plan.counts.clone().into_tensor_arg(),
            spans.clone().into_buffer_arg(),
            counts.clone().into_buffer_arg(),
            sizes.items * sizes.blocks,
            sizes.tiles,
            queries,
            geometry.q_len,
            geometry.k_len,
            bit_blocks,
            bit_queries,
            sizes.room,
            geometry.causal,
        );
    }
    let team = Team::new(client, 1);
    // SAFETY: cubes past the tiles return; a list has room for every block, and for the keys that are gathered.
    unsafe {
        list_kernel::launch_unchecked(
            client,
            cubes(client, sizes.items, team.cube_dim()),
            team.cube_dim(),
            address,
            spans.into_buffer_arg(),
            list.clone().into_buffer_arg(),
            counts.clone().into_buffer_arg(),
            sizes.items,
            sizes.blocks,
            sizes.capacity(),
            sizes.room,
            team,
        );
    }
    launch_gather(client, address, geometry, plan, [&list, &counts], sizes);
    mark_not_finite(client, watched, element, &counts);
    TileLists { list, counts }
}

/// A unit finds what the queries of one tile see of one key block: span `at` of `spans`, `[rows, tiles, blocks]`, has two
/// words of the keys that some of them sees, and two of those that all see.
///
/// `bits` and `counts` are the plan's, the bits of `bit_blocks` blocks and `bit_queries` queries. The first unit writes
/// the header of `totals`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn span_kernel(
    bits: &[Vector<u32, Const<2>>],
    counts: &Tensor<u32>,
    spans: &mut [Vector<u32, Const<4>>],
    totals: &mut [u32],
    items: usize,
    tiles: usize,
    queries: usize,
    q_len: usize,
    k_len: usize,
    bit_blocks: usize,
    bit_queries: usize,
    room: usize,
    #[comptime] causal: bool,
) {
    let at = ABSOLUTE_POS;
    if at >= items {
        terminate!();
    }
    if at == 0 {
        totals[0] = bit_blocks as u32;
        totals[1] = bit_queries as u32;
        totals[2] = 0u32;
        totals[3] = room as u32;
    }
    let (query_blocks, blocks) = (counts.shape(2), counts.shape(3));
    let (block, tile, row) = (at % blocks, at / blocks % tiles, at / blocks / tiles);
    let first = tile * queries;
    let last = min(first + queries, q_len);
    let keys = min(k_len - block * 64, 64usize);
    let mut sum = 0u32;
    let mut pairs = 0u32;
    for query_block in first / 16..last.div_ceil(16usize) {
        sum += counts[(row * query_blocks + query_block) * blocks + block];
        pairs += (min(q_len - query_block * 16, 16usize) * keys) as u32;
    }
    let every = u32::new(comptime!(u32::MAX as i64));
    let mut span = Vector::<u32, Const<4>>::new(0u32);
    // A last block of fewer keys is never whole: what lies behind it is tested away.
    if sum == pairs && keys == 64 {
        span = Vector::new(every);
    } else if sum > 0 {
        span.insert(2usize, every);
        span.insert(3usize, every);
        let mut base = row * bit_blocks * bit_queries;
        if bit_blocks > 1 {
            base += block * bit_queries;
        }
        let mut next = first;
        while next < last {
            // Several at once: their loads wait together. The last query again changes nothing.
            #[unroll]
            for n in 0..8usize {
                let query = min(next + n, last - 1);
                let mut stored = query;
                if bit_queries == 1 {
                    stored = 0usize;
                }
                let words = bits[base + stored];
                #[unroll]
                for half in 0..2usize {
                    let seen = words.extract(half)
                        & prefix(block * 64 + half * 32, query, q_len, k_len, causal);
                    span.insert(half, span.extract(half) | seen);
                    span.insert(
                        comptime!(2 + half),
                        span.extract(comptime!(2 + half)) & seen,
                    );
                }
            }
            next += 8;
        }
    }
    spans[at] = span;
}

/// Blocks that a lane of [`list_kernel`] takes at once, whose spans it reads together.
const LANE_BLOCKS: usize = 4;

/// A plane writes the list and the totals of one tile: tile `CUBE_POS % tiles` of row `CUBE_POS / tiles` of the mask.
/// `spans` are those of [`span_kernel`]; the list gets keys if they are few enough and fit into `room`, else blocks.
#[cube(launch_unchecked, address_type = "dynamic")]
fn list_kernel(
    spans: &[Vector<u32, Const<4>>],
    list: &mut [u32],
    totals: &mut [u32],
    items: usize,
    blocks: usize,
    capacity: usize,
    room: usize,
    #[comptime] team: Team,
) {
    let item = CUBE_POS;
    if item >= items {
        terminate!();
    }
    let member = Member::this(team);
    let own = item * blocks;
    // Blocks, and keys, of which some query sees something, and those that all queries see.
    let mut some_blocks = 0u32;
    let mut all_blocks = 0u32;
    let mut some_keys = 0u32;
    let mut all_keys = 0u32;
    let mut start = member.lane * LANE_BLOCKS;
    while start < blocks {
        #[unroll]
        for n in 0..LANE_BLOCKS {
            let span = span_of(spans, own, start + n, blocks);
            let some = span.extract(0usize).count_ones() + span.extract(1usize).count_ones();
            let all = span.extract(2usize).count_ones() + span.extract(3usize).count_ones();
            some_blocks += u32::cast_from(some > 0);
            all_blocks += u32::cast_from(all == 64);
            some_keys += some;
            all_keys += all;
        }
        start += comptime!(team.lanes * LANE_BLOCKS);
    }
    some_blocks = sum_of(some_blocks, team);
    all_blocks = sum_of(all_blocks, team);
    some_keys = sum_of(some_keys, team);
    all_keys = sum_of(all_keys, team);
    let gathered =
        some_keys * 4 <= some_blocks * comptime!(64 * GATHERED_OF_4) && some_keys <= room as u32;

    let mut to = item * capacity;
    // What all queries see comes first.
    #[unroll]
    for rest in [false, true] {
        let mut round = 0usize;
        while round < blocks {
            let start = round + member.lane * LANE_BLOCKS;
            let mut count = 0u32;
            let mut low = Array::<u32>::new(LANE_BLOCKS);
            let mut high = Array::<u32>::new(LANE_BLOCKS);
            #[unroll]
            for n in 0..LANE_BLOCKS {
                let span = span_of(spans, own, start + n, blocks);
                low[n] = wanted(span.extract(0usize), span.extract(2usize), rest);
                high[n] = wanted(span.extract(1usize), span.extract(3usize), rest);
                if !gathered {
                    // A block is one entry.
                    let all = span.extract(2usize).count_ones() + span.extract(3usize).count_ones();
                    let mut listed = all == 64;
                    if comptime!(rest) {
                        listed = all < 64 && span.extract(0usize) | span.extract(1usize) > 0;
                    }
                    low[n] = u32::cast_from(listed);
                    high[n] = 0u32;
                }
                count += low[n].count_ones() + high[n].count_ones();
            }
            let mut at = to + (sum_up_to(count, &member, team) - count) as usize;
            #[unroll]
            for n in 0..LANE_BLOCKS {
                let block = start + n;
                if gathered {
                    write_keys(list, at, block * 64, low[n]);
                    at += low[n].count_ones() as usize;
                    write_keys(list, at, block * 64 + 32, high[n]);
                    at += high[n].count_ones() as usize;
                } else if low[n] == 1u32 {
                    list[at] = block as u32;
                    at += 1;
                }
            }
            to += sum_of(count, team) as usize;
            round += comptime!(team.lanes * LANE_BLOCKS);
        }
    }
    if member.lane == 0 {
        let at = HEADER + item * TILE_WORDS;
        totals[at] = select(gathered, all_keys, all_blocks * 64);
        totals[at + 1] = select(gathered, some_keys, some_blocks * 64);
        totals[at + 2] = u32::cast_from(gathered);
    }
}

/// The span of a block; nothing past the last.
#[cube]
fn span_of(
    spans: &[Vector<u32, Const<4>>],
    own: usize,
    block: usize,
    blocks: usize,
) -> Vector<u32, Const<4>> {
    let mut span = Vector::<u32, Const<4>>::new(0u32);
    if block < blocks {
        span = spans[own + block];
    }
    span
}

/// The keys that all queries see, or the rest of those that some see.
#[cube]
fn wanted(some: u32, all: u32, #[comptime] rest: bool) -> u32 {
    let mut keys = all;
    if comptime!(rest) {
        keys = some & !all;
    }
    keys
}

/// Writes the keys from `first` on whose bits are set, one after the other.
#[cube]
fn write_keys(list: &mut [u32], at: usize, first: usize, bits: u32) {
    let mut left = bits;
    let mut to = at;
    while left != 0 {
        list[to] = first as u32 + left.trailing_zeros();
        left &= left - 1;
        to += 1;
    }
}
