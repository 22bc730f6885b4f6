//! The keys that a query tile sees, listed for tensor cores: key blocks, or single keys where that is shorter.

use crate::host::scratch::{address_type, cubes, scratch};
use crate::pattern::layout::{TILE_LIST_HEADER, TILE_LIST_WORDS, first_bits};
use crate::pattern::mask::args::MaskBits;
use crate::pattern::mask::gather::finish_lists;
use crate::pattern::mask::sizes::{ListSizes, PLANES, Sizes, TileLists};
use crate::pattern::position::end_key;
use crate::team::{Member, Team, sum_of, sum_up_to};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{ElementType, PlanGeometry};

/// Keys are gathered one by one if a tile's queries together see at most this many of every 4 keys of the blocks that
/// they see some of: a step of gathered keys costs a little more than one of a block, and the bits are packed anew.
const GATHERED_OF_4: u32 = 3;

/// Lists the keys that tiles of `queries` queries see, in two launches. `watched` is k or v,
/// `[batch, kv_heads, k_len, head_dim]` in segments of 16 bytes; the header tells whether all of its values are finite.
/// Without `gather` all lists are of blocks.
///
/// Memory: about half of the bits of a plan that broadcasts no queries, and 16 bytes per tile and key block.
pub(crate) fn tile_lists(
    client: &Client,
    geometry: &PlanGeometry,
    plan: &MaskBits,
    queries: usize,
    watched: &TensorBinding,
    element: ElementType,
    gather: bool,
) -> TileLists {
    let sizes = Sizes::new(geometry, queries, gather);
    let list = scratch(client, sizes.list(geometry));
    let counts = scratch(client, sizes.counts());
    let spans = scratch(client, sizes.spans());
    let team = Team::new(client, PLANES);
    // SAFETY: cubes past the tiles return; a list has room for every block, and for the keys that are gathered; the
    // plan was checked to have the geometry's shapes.
    unsafe {
        list_kernel::launch_unchecked(
            client,
            cubes(client, sizes.items, team.cube_dim()),
            team.cube_dim(),
            address_type([&plan.bits, &plan.counts, &list, &counts, &spans]),
            plan.bits.clone().into_buffer_arg(),
            plan.counts.clone().into_tensor_arg(),
            spans.into_buffer_arg(),
            list.clone().into_buffer_arg(),
            counts.clone().into_buffer_arg(),
            sizes.items,
            sizes.of_kernels(geometry),
            ListBlueprint {
                causal: geometry.causal,
                team,
            },
        );
    }
    let lists = TileLists { list, counts };
    finish_lists(client, geometry, plan, watched, element, &lists, sizes);
    lists
}

/// The configuration of [`list_kernel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ListBlueprint {
    causal: bool,
    team: Team,
}

/// A cube writes the list and the totals of tile `CUBE_POS % tiles` of row `CUBE_POS / tiles` of the mask: keys, if
/// they are few enough and fit into `room`, else blocks. Each plane owns a range of blocks, each lane one at a time.
///
/// `bits` and `counts` belong to the plan, the bits with `bit_blocks` blocks and `bit_queries` queries; `list` and
/// `totals` as in [`TileLists`], whose header the first unit writes. `spans`, `[rows, tiles, blocks]`, is scratch: per
/// tile and block, two words of the keys that some query sees, and two of the keys that all see.
#[cube(launch_unchecked, address_type = "dynamic")]
fn list_kernel(
    bits: &[Vector<u32, Const<2>>],
    counts: &Tensor<u32>,
    spans: &mut [Vector<u32, Const<4>>],
    list: &mut [u32],
    totals: &mut [u32],
    items: usize,
    sizes: &ListSizes,
    #[comptime] bp: ListBlueprint,
) {
    let (causal, team) = comptime!((bp.causal, bp.team));
    let item = CUBE_POS;
    if item >= items {
        terminate!();
    }
    if item == 0 && UNIT_POS == 0 {
        totals[0] = sizes.bit_blocks as u32;
        totals[1] = sizes.bit_queries as u32;
        totals[2] = 0u32;
        totals[3] = sizes.room as u32;
    }
    let member = Member::this(team);
    let blocks = counts.shape(3);
    let own = item * blocks;
    let stretch = blocks.div_ceil(comptime!(team.planes * team.lanes)) * comptime!(team.lanes);
    let begin = member.plane * stretch;
    let end = min(begin + stretch, blocks);

    // For this plane's range: the numbers of blocks and of keys that some query sees, and that all see.
    let mut sums = Shared::<[u32]>::new_slice(comptime!(team.planes * 4));
    let mut found = Array::<u32>::new(4usize);
    #[unroll]
    for n in 0..4usize {
        found[n] = 0u32;
    }
    let mut round = begin;
    while round < end {
        let block = round + member.lane;
        if block < end {
            let (tile, row) = (item % sizes.tiles, item / sizes.tiles);
            let span = span_of(bits, counts, tile, row, block, sizes, causal);
            spans[own + block] = span;
            let some = span.extract(0usize).count_ones() + span.extract(1usize).count_ones();
            let all = span.extract(2usize).count_ones() + span.extract(3usize).count_ones();
            found[0] += u32::cast_from(some > 0);
            found[1] += u32::cast_from(all == 64);
            found[2] += some;
            found[3] += all;
        }
        round += comptime!(team.lanes);
    }
    #[unroll]
    for n in 0..4usize {
        let sum = sum_of(found[n], team);
        if member.lane == 0 {
            sums[member.plane * 4 + n] = sum;
        }
    }
    sync_cube();

    // The sums over all planes, and over the planes before this one.
    let mut total = Array::<u32>::new(4usize);
    let mut before = Array::<u32>::new(4usize);
    #[unroll]
    for n in 0..4usize {
        total[n] = 0u32;
        before[n] = 0u32;
        for plane in 0..team.planes {
            let sum = sums[plane * 4 + n];
            total[n] += sum;
            before[n] += select(plane < member.plane, sum, 0u32);
        }
    }
    let gathered =
        total[2] * 4 <= total[0] * comptime!(64 * GATHERED_OF_4) && total[2] <= sizes.room as u32;
    if UNIT_POS == 0 {
        let at = TILE_LIST_HEADER + item * TILE_LIST_WORDS;
        totals[at] = select(gathered, total[3], total[1] * 64);
        totals[at + 1] = select(gathered, total[2], total[0] * 64);
        totals[at + 2] = u32::cast_from(gathered);
    }

    // Keys that all queries see come first, then the rest of those that some see.
    let some_before = select(gathered, before[2], before[0]);
    let all_before = select(gathered, before[3], before[1]);
    let mut to = Array::<usize>::new(2usize);
    to[0] = item * sizes.capacity + all_before as usize;
    to[1] = item * sizes.capacity
        + (select(gathered, total[3], total[1]) + some_before - all_before) as usize;
    let mut round = begin;
    while round < end {
        let block = round + member.lane;
        let mut span = Vector::<u32, Const<4>>::new(0u32);
        if block < end {
            span = spans[own + block];
        }
        let full = span.extract(2usize) & span.extract(3usize) == every();
        #[unroll]
        for rest in [false, true] {
            let mut low = span.extract(2usize);
            let mut high = span.extract(3usize);
            if comptime!(rest) {
                low = span.extract(0usize) & !low;
                high = span.extract(1usize) & !high;
            }
            let mut count = low.count_ones() + high.count_ones();
            if !gathered {
                // A block is one entry.
                let mut listed = full;
                if comptime!(rest) {
                    listed = !full && span.extract(0usize) | span.extract(1usize) != 0u32;
                }
                count = u32::cast_from(listed);
            }
            let next = comptime!(rest as usize);
            let mut at = to[next] + (sum_up_to(count, &member, team) - count) as usize;
            if gathered {
                write_keys(list, at, block * 64, low);
                at += low.count_ones() as usize;
                write_keys(list, at, block * 64 + 32, high);
            } else if count == 1u32 {
                list[at] = block as u32;
            }
            to[next] += sum_of(count, team) as usize;
        }
        round += comptime!(team.lanes);
    }
}

#[cube]
fn every() -> u32 {
    u32::new(comptime!(u32::MAX as i64))
}

/// The keys of a block that the queries of tile `tile` of row `row` of the mask see: two words of the keys that some of
/// them see, and two of the keys that all see.
#[cube]
fn span_of(
    bits: &[Vector<u32, Const<2>>],
    counts: &Tensor<u32>,
    tile: usize,
    row: usize,
    block: usize,
    sizes: &ListSizes,
    #[comptime] causal: bool,
) -> Vector<u32, Const<4>> {
    let (queries, q_len, k_len) = (sizes.queries, sizes.q_len, sizes.k_len);
    let (bit_blocks, bit_queries) = (sizes.bit_blocks, sizes.bit_queries);
    let (query_blocks, blocks) = (counts.shape(2), counts.shape(3));
    let first = tile * queries;
    let last = min(first + queries, q_len);
    let keys = min(k_len - block * 64, 64usize);
    let mut sum = 0u32;
    let mut pairs = 0u32;
    let query_end = last.div_ceil(16usize);
    let mut next = first / 16;
    while next < query_end {
        // Several at once, so that the loads overlap.
        #[unroll]
        for n in 0..4usize {
            let query_block = min(next + n, query_end - 1);
            let count = counts[(row * query_blocks + query_block) * blocks + block];
            let rows = min(q_len - query_block * 16, 16usize);
            sum += select(next + n < query_end, count, 0u32);
            pairs += select(next + n < query_end, (rows * keys) as u32, 0u32);
        }
        next += 4;
    }
    let mut span = Vector::<u32, Const<4>>::new(0u32);
    // A last block of fewer keys is never full: the test masks the keys past its end.
    if sum == pairs && keys == 64 {
        span = Vector::new(every());
    } else if sum > 0 {
        span.insert(2usize, every());
        span.insert(3usize, every());
        let mut base = row * bit_blocks * bit_queries;
        if bit_blocks > 1 {
            base += block * bit_queries;
        }
        let mut next = first;
        while next < last {
            // Repeating the last query changes nothing.
            #[unroll]
            for n in 0..16usize {
                let query = min(next + n, last - 1);
                let mut stored = query;
                if bit_queries == 1 {
                    stored = 0usize;
                }
                let words = bits[base + stored];
                let end = end_key(query, q_len, k_len, causal);
                #[unroll]
                for half in 0..2usize {
                    let seen =
                        words.extract(half) & first_bits(end - (block * 64 + half * 32) as i32);
                    span.insert(half, span.extract(half) | seen);
                    span.insert(
                        comptime!(2 + half),
                        span.extract(comptime!(2 + half)) & seen,
                    );
                }
            }
            next += 16;
        }
    }
    span
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
