//! The query tiles that see a key tile.

use crate::host::scratch::{address_type, bytes, cubes, one_unit_each, scratch};
use crate::pattern::layout::{HEAD_BITS, QUERY_LIST_HEADER};
use crate::pattern::mask::args::MaskBits;
use crate::pattern::mask::sizes::PLANES;
use crate::team::{Member, Team, ballot};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::MaskedProblem;

/// The steps of the dk/dv kernel under a mask: for each key tile and group of heads that share a tile, its query tiles.
///
/// A list holds first the steps whose queries see all of the keys, then the others, both head by head in the order of
/// the queries. Heads that see the same keys share a list: there is one for each kv head of the mask, or for all.
#[derive(Clone, Debug)]
pub(crate) struct QueryLists {
    /// `[batch, kv heads, key tiles, capacity]` of the mask, u32: the query tile, and in the lower [`HEAD_BITS`] bits
    /// the index of the group of heads that share a tile; undefined past the total.
    pub list: TensorBinding,
    /// [`QUERY_LIST_HEADER`] words, then `[batch, kv heads, key tiles, 2]`, u32: the number of steps that see all keys,
    /// and of all steps.
    pub counts: TensorBinding,
    pub capacity: usize,
}

/// The shape of a step of the dk/dv kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepShape {
    pub keys: usize,
    pub queries: usize,
    /// Query heads of one kv head that share a tile.
    pub heads: usize,
}

impl QueryLists {
    /// The shapes of `list` and `counts` of a problem with a mask.
    fn shapes(problem: &MaskedProblem, step: StepShape) -> ([usize; 4], [usize; 1]) {
        let geometry = problem.plan.expect("there is a mask");
        let p = &problem.attention;
        let [batch, heads, ..] = geometry.counts_shape();
        let tiles = p.k_len.div_ceil(step.keys);
        let capacity = p.q_len.div_ceil(step.queries) * (p.group() / step.heads);
        // Rows of the mask per list: one, or one for each head of the group.
        let list_heads = heads.min(p.kv_heads);
        let items = batch * list_heads * tiles;
        (
            [batch, list_heads, tiles, capacity],
            [QUERY_LIST_HEADER + items * 2],
        )
    }

    /// The bytes of the buffers that [`query_lists`] allocates.
    pub(crate) fn bytes(problem: &MaskedProblem, step: StepShape) -> usize {
        let (list, counts) = Self::shapes(problem, step);
        bytes(list) + bytes(counts)
    }
}

/// The bits of a step's entry that are left for the query tile.
const TILE_BITS: usize = 32 - HEAD_BITS;

/// True if [`query_lists`] can write the steps of a problem.
pub(crate) fn lists_fit(problem: &MaskedProblem, step: StepShape) -> bool {
    let p = &problem.attention;
    p.q_len.div_ceil(step.queries) < 1 << TILE_BITS && p.group() / step.heads <= 1 << HEAD_BITS
}

/// Lists the steps of a problem with a mask, in one launch.
pub(crate) fn query_lists(
    client: &Client,
    problem: &MaskedProblem,
    plan: &MaskBits,
    step: StepShape,
) -> QueryLists {
    let geometry = problem.plan.expect("there is a mask");
    let p = &problem.attention;
    let [_, heads, ..] = geometry.counts_shape();
    let [_, _, bit_blocks, bit_queries, _] = geometry.bits_shape();
    let (list_shape, counts_shape) = QueryLists::shapes(problem, step);
    let [batch, list_heads, tiles, capacity] = list_shape;
    let items = batch * list_heads * tiles;
    let list = scratch(client, list_shape);
    let counts = scratch(client, counts_shape);
    let team = Team::new(client, PLANES);
    // SAFETY: cubes past the tiles return; a list has an entry for every step, and the plan was checked.
    unsafe {
        query_list_kernel::launch_unchecked(
            client,
            cubes(client, items, team.cube_dim()),
            team.cube_dim(),
            address_type([&plan.counts, &list, &counts]),
            plan.counts.clone().into_tensor_arg(),
            list.clone().into_tensor_arg(),
            counts.clone().into_tensor_arg(),
            StepSizesLaunch::new(
                items,
                tiles,
                p.group() / step.heads,
                heads / list_heads,
                p.q_len,
                p.k_len,
                bit_blocks as u32,
                bit_queries as u32,
            ),
            step.queries,
            step.keys,
            team,
        );
    }
    QueryLists {
        list,
        counts,
        capacity,
    }
}

/// Sizes of a launch of [`query_list_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct StepSizes {
    pub items: usize,
    pub tiles: usize,
    pub head_groups: usize,
    pub rows_each: usize,
    pub q_len: usize,
    pub k_len: usize,
    pub bit_blocks: u32,
    pub bit_queries: u32,
}

/// A cube lists the steps of one key tile: tile `CUBE_POS % tiles` of list row `CUBE_POS / tiles`, which has
/// `rows_each` rows of the mask, one for all `head_groups` groups of heads or one for each. The first cube writes the
/// header.
///
/// `counts` is the plan's `[batch, heads, query_blocks, key_blocks]`; `list` and `totals` as in [`QueryLists`].
#[cube(launch_unchecked, address_type = "dynamic")]
fn query_list_kernel(
    counts: &Tensor<u32>,
    list: &mut Tensor<u32>,
    totals: &mut Tensor<u32>,
    sizes: &StepSizes,
    #[comptime] queries: usize,
    #[comptime] keys: usize,
    #[comptime] team: Team,
) {
    let item = CUBE_POS;
    if item >= sizes.items {
        terminate!();
    }
    if item == 0 && UNIT_POS == 0 {
        let (batches, heads) = (counts.shape(0) as u32, counts.shape(1) as u32);
        let rows_each = sizes.rows_each as u32;
        totals[0] = step(batches, heads / rows_each);
        totals[1] = step(heads / rows_each, 1u32);
        totals[2] = step(batches, heads);
        totals[3] = step(heads / rows_each, rows_each);
        totals[4] = step(rows_each, 1u32);
        totals[5] = sizes.bit_blocks * sizes.bit_queries;
        totals[6] = step(sizes.bit_blocks, sizes.bit_queries);
        totals[7] = step(sizes.bit_queries, 1u32);
    }
    let member = Member::this(team);
    let (tile, list_row) = (item % sizes.tiles, item / sizes.tiles);
    let query_tiles = sizes.q_len.div_ceil(queries);
    let steps = query_tiles * sizes.head_groups;
    // A plane owns a contiguous range of steps.
    let round = comptime!(AT_ONCE * team.lanes);
    let stretch = steps.div_ceil(round * team.planes) * round;
    let begin = min(member.plane * stretch, steps);
    let end = min(begin + stretch, steps);
    let mut found = Shared::<[u32]>::new_slice(comptime!(team.planes * 2));
    let mut full = 0usize;
    let mut boundary = 0usize;
    // Steps are counted, then written after those of the preceding planes, the boundary ones after all full ones.
    #[unroll]
    for writes in [false, true] {
        let mut start = begin;
        while start < end {
            // Several at once, so that the reads overlap.
            let mut kinds = Array::<u32>::new(AT_ONCE);
            #[unroll]
            for n in 0..AT_ONCE {
                let own = start + comptime!(n * team.lanes) + member.lane;
                let (heads, query_tile) = (own / query_tiles, own % query_tiles);
                let row = list_row * sizes.rows_each + min(heads, sizes.rows_each - 1);
                let kind = kind_of(counts, row, tile, query_tile, sizes.k_len, queries, keys);
                kinds[n] = select(own < steps, kind, EMPTY);
            }
            #[unroll]
            for n in 0..AT_ONCE {
                let is_full = kinds[n] == FULL;
                let is_boundary = kinds[n] == BOUNDARY;
                let full_lanes = ballot(is_full, team);
                let boundary_lanes = ballot(is_boundary, team);
                if comptime!(writes) {
                    let own = start + comptime!(n * team.lanes) + member.lane;
                    let (heads, query_tile) = (own / query_tiles, own % query_tiles);
                    let before = select(is_full, full_lanes, boundary_lanes) & member.before;
                    let to = select(is_full, full, boundary) + before.count_ones() as usize;
                    if kinds[n] != EMPTY {
                        list[item * steps + to] = ((query_tile << HEAD_BITS) | heads) as u32;
                    }
                }
                full += full_lanes.count_ones() as usize;
                boundary += boundary_lanes.count_ones() as usize;
            }
            start += round;
        }
        if comptime!(!writes) {
            if member.lane == 0 {
                found[member.plane * 2] = full as u32;
                found[member.plane * 2 + 1] = boundary as u32;
            }
            sync_cube();
            let mut all_full = 0usize;
            let mut all_boundary = 0usize;
            full = 0usize;
            boundary = 0usize;
            for plane in 0..team.planes {
                let these = found[plane * 2] as usize;
                let those = found[plane * 2 + 1] as usize;
                all_full += these;
                all_boundary += those;
                full += select(plane < member.plane, these, 0usize);
                boundary += select(plane < member.plane, those, 0usize);
            }
            boundary += all_full;
            if UNIT_POS == 0 {
                totals[QUERY_LIST_HEADER + item * 2] = all_full as u32;
                totals[QUERY_LIST_HEADER + item * 2 + 1] = (all_full + all_boundary) as u32;
            }
        }
    }
}

/// Steps that a lane checks together.
const AT_ONCE: usize = 4;

/// The kinds of a query tile, by which keys of a key tile its queries see: none, all or some.
const EMPTY: u32 = 0;
const FULL: u32 = 1;
const BOUNDARY: u32 = 2;

/// The kind of a query tile, by the counts of row `row` of the mask.
#[cube]
fn kind_of(
    counts: &Tensor<u32>,
    row: usize,
    tile: usize,
    query_tile: usize,
    k_len: usize,
    #[comptime] queries: usize,
    #[comptime] keys: usize,
) -> u32 {
    let (query_blocks, blocks) = (counts.shape(2), counts.shape(3));
    let mut sum = 0u32;
    let mut pairs = 0u32;
    #[unroll]
    for q in 0..comptime!(queries.div_ceil(16)) {
        // A tile may be a part of a block: the tile is full if the block is.
        let query_block = query_tile * queries / 16 + q;
        // Rows past the last query see nothing, so they make the tile boundary.
        pairs += comptime!(16 * keys as u32);
        #[unroll]
        for b in 0..comptime!(keys / 64) {
            let block = tile * comptime!(keys / 64) + b;
            let there = query_block < query_blocks && block < blocks;
            let from = (row * query_blocks + min(query_block, query_blocks - 1)) * blocks
                + min(block, blocks - 1);
            sum += select(there, counts[from], 0u32);
            // Keys past the last are seen by every query.
            let end = min((block + 1) * 64, k_len);
            let missing = (block + 1) * 64 - max(end, block * 64);
            pairs -= missing as u32 * 16u32;
        }
    }
    let mut kind = EMPTY.runtime();
    if sum > 0 {
        kind = BOUNDARY;
    }
    if sum == pairs && sum > 0 {
        kind = FULL;
    }
    kind
}

/// The stride between the entries of an axis of `size`: 0 broadcasts.
#[cube]
fn step(size: u32, each: u32) -> u32 {
    select(size == 1, 0u32, each)
}

/// Sums the gradients of the biases of all heads, contiguous `[batch, heads, len]`, over the sequences and heads that
/// share a bias, in a fixed order, into `grad`, contiguous `[batch | 1, own heads, 1, len]` or `[.., len, 1]`. The own
/// heads divide the heads.
pub(crate) fn sum_heads(client: &Client, parts: &TensorBinding, grad: &TensorBinding) {
    let items = grad.shape.iter().product();
    let (count, dim) = one_unit_each(client, items);
    // SAFETY: units past the elements return; both buffers hold their shapes, of which those of `grad` divide.
    unsafe {
        sum_heads_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type([parts, grad]),
            parts.clone().into_tensor_arg(),
            grad.clone().into_tensor_arg(),
            items,
        );
    }
}

/// Buffers as in [`sum_heads`]: one unit per element of `grad`, which is overwritten.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_heads_kernel(parts: &Tensor<f32>, grad: &mut Tensor<f32>, items: usize) {
    let at = ABSOLUTE_POS;
    if at >= items {
        terminate!();
    }
    let (batches, heads, len) = (parts.shape(0), parts.shape(1), parts.shape(2));
    let (own_batches, own_heads) = (grad.shape(0), grad.shape(1));
    let (column, row) = (at % len, at / len);
    let (own_head, own_batch) = (row % own_heads, row / own_heads);
    let mut sum = 0.0f32;
    let (batches_each, heads_each) = (batches / own_batches, heads / own_heads);
    for batch in 0..batches_each {
        // Summed separately, so that long sums round less.
        let mut of_batch = 0.0f32;
        for head in 0..heads_each {
            let from = (own_batch * batches_each + batch) * heads + own_head * heads_each + head;
            of_batch += parts[from * len + column];
        }
        sum += of_batch;
    }
    grad[at] = sum;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{client, contiguous, read_u32};
    use crate::{AttentionOptions, ElementType};
    use flash_dma_reference::Rng;

    /// Lists from random counts, with many empty and many full blocks.
    #[test]
    fn lists_hold_the_steps_that_see_keys_and_the_whole_ones_first() {
        let client = client();
        let cases = [(1, 4, 2), (2, 4, 1), (8, 1, 2), (8, 1, 1)];
        for (n, (mask_heads, heads, fragments)) in cases.into_iter().enumerate() {
            let (q_len, k_len, group) = (150 + n, 333, 4);
            let (q, kv) = ([2, 8, q_len, 64], [2, 2, k_len, 64]);
            let mask = [2, mask_heads, q_len, k_len];
            let (element, options) = (ElementType::Bf16, AttentionOptions::new());
            let (mask, options) = (Some(&mask[..]), options.with_causal(false));
            let problem = MaskedProblem::new(&q, &kv, &kv, mask, None, element, &options).unwrap();
            let geometry = problem.plan.unwrap();
            let shape = geometry.counts_shape();
            let [_, _, query_blocks, key_blocks] = shape;
            let mut rng = Rng::new(n as u64);
            let counts: Vec<u32> = (0..shape.iter().product())
                .map(|at: usize| {
                    let pairs = geometry.pairs(at / key_blocks % query_blocks, at % key_blocks);
                    [0, pairs, pairs, pairs / 2][rng.below(4)] as u32
                })
                .collect();
            let tensor = contiguous(&client, &counts, &shape);
            let plan = MaskBits {
                bits: tensor.clone(),
                counts: tensor,
            };
            let step = StepShape {
                keys: 64 * fragments,
                queries: 64 / heads,
                heads,
            };
            let lists = query_lists(&client, &problem, &plan, step);
            let [list, totals] = [lists.list, lists.counts].map(|words| read_u32(&client, words));
            let (keys, queries) = (step.keys, step.queries);
            let (tiles, list_heads) = (k_len.div_ceil(keys), mask_heads.min(2));
            for item in 0..2 * list_heads * tiles {
                let (row, tile) = (item / tiles, item % tiles);
                let mut expected = [Vec::new(), Vec::new()];
                for head in 0..group / heads {
                    let row = row * (mask_heads / list_heads) + head % (mask_heads / list_heads);
                    for query_tile in 0..q_len.div_ceil(queries) {
                        let (first, end) = (query_tile * queries, (query_tile + 1) * queries);
                        let mut seen = 0;
                        let mut pairs = 0;
                        for i in first / 16..end.min(q_len).div_ceil(16) {
                            for j in tile * keys / 64..((tile + 1) * keys).min(k_len).div_ceil(64) {
                                seen += counts[(row * query_blocks + i) * key_blocks + j] as usize;
                                pairs += geometry.pairs(i, j);
                            }
                        }
                        let some = usize::from(seen < pairs || end > q_len);
                        if seen > 0 {
                            expected[some].push((query_tile << HEAD_BITS | head) as u32);
                        }
                    }
                }
                let at = QUERY_LIST_HEADER + item * 2;
                let full = expected[0].len();
                let expected = expected.concat();
                let total = expected.len();
                let counted = [full as u32, total as u32];
                assert_eq!(totals[at..at + 2], counted, "{n} {item}");
                let from = item * lists.capacity;
                assert_eq!(list[from..from + total], expected, "{n} {item}");
            }
        }
    }
}
