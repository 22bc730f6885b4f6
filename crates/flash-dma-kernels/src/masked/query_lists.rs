//! Which query tiles see a tile of keys.

use super::args::MaskBits;
use crate::backward::mma::{DkdvBlueprint, HEAD_BITS, HEADER};
use crate::scratch::{address_type, cubes, one_unit_each, scratch};
use crate::team::{Member, Team, ballot, sum_up_to};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::MaskedProblem;

/// The steps of the dk/dv kernel under a mask: for each tile of keys the query tiles that see some of it, of each group
/// of heads that share a tile.
///
/// A list holds first the steps whose queries see all the keys, then the others, both in the order of the queries. Heads that
/// see the same share a list: there is one for each kv head of the mask, or for all.
#[derive(Clone, Debug)]
pub(super) struct QueryLists {
    /// `[batch, kv heads, key tiles, capacity]` of the mask, u32: the query tile, and in the lower [`HEAD_BITS`] bits which
    /// heads of the group; past the total undefined.
    pub list: TensorBinding,
    /// [`HEADER`] words, then `[batch, kv heads, key tiles, 2]`, u32: the number of whole steps, and of all.
    pub counts: TensorBinding,
    /// Entries a list.
    pub capacity: usize,
}

/// Of a step's entry the bits that are left for the query tile.
const TILE_BITS: usize = 32 - HEAD_BITS;

/// Whether [`query_lists`] can write the steps of a problem.
pub(super) fn lists_fit(problem: &MaskedProblem, blueprint: DkdvBlueprint) -> bool {
    let p = &problem.attention;
    p.q_len.div_ceil(blueprint.queries()) < 1 << TILE_BITS
        && p.group() / blueprint.heads <= 1 << HEAD_BITS
}

/// Lists the steps of a problem with a mask, in one launch.
pub(super) fn query_lists(
    client: &Client,
    problem: &MaskedProblem,
    plan: &MaskBits,
    blueprint: DkdvBlueprint,
) -> QueryLists {
    let geometry = problem.plan.expect("there is a mask");
    let p = &problem.attention;
    let [batch, heads, ..] = geometry.counts_shape();
    let [_, _, bit_blocks, bit_queries, _] = geometry.bits_shape();
    let (keys, queries) = (blueprint.keys(), blueprint.queries());
    let tiles = p.k_len.div_ceil(keys);
    let head_groups = p.group() / blueprint.heads;
    let capacity = p.q_len.div_ceil(queries) * head_groups;
    // Rows of the mask of a list: one, or one for each head of the group.
    let list_heads = heads.min(p.kv_heads);
    let rows_each = heads / list_heads;
    let items = batch * list_heads * tiles;
    let list = scratch(client, [batch, list_heads, tiles, capacity]);
    let counts = scratch(client, [HEADER + items * 2]);
    let team = Team::new(client, 1);
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
            items,
            tiles,
            queries,
            keys,
            head_groups,
            rows_each,
            p.q_len,
            p.k_len,
            bit_blocks as u32,
            bit_queries as u32,
            team,
        );
    }
    QueryLists {
        list,
        counts,
        capacity,
    }
}

/// A cube lists the steps of one tile of keys: tile `CUBE_POS % tiles` of list row `CUBE_POS / tiles`, which has
/// `rows_each` rows of the mask, one for all `head_groups` groups of heads or one for each. The first cube writes the
/// header.
///
/// `counts` is the plan's `[batch, heads, query_blocks, key_blocks]`; `list` and `totals` as in [`QueryLists`].
#[cube(launch_unchecked, address_type = "dynamic")]
fn query_list_kernel(
    counts: &Tensor<u32>,
    list: &mut Tensor<u32>,
    totals: &mut Tensor<u32>,
    items: usize,
    tiles: usize,
    queries: usize,
    keys: usize,
    head_groups: usize,
    rows_each: usize,
    q_len: usize,
    k_len: usize,
    bit_blocks: u32,
    bit_queries: u32,
    #[comptime] team: Team,
) {
    let item = CUBE_POS;
    if item >= items {
        terminate!();
    }
    if item == 0 && UNIT_POS == 0 {
        let (batches, heads) = (counts.shape(0) as u32, counts.shape(1) as u32);
        let rows_each = rows_each as u32;
        totals[0] = step(batches, heads / rows_each);
        totals[1] = step(heads / rows_each, 1u32);
        totals[2] = step(batches, heads);
        totals[3] = step(heads / rows_each, rows_each);
        totals[4] = step(rows_each, 1u32);
        totals[5] = bit_blocks * bit_queries;
        totals[6] = step(bit_blocks, bit_queries);
        totals[7] = step(bit_queries, 1u32);
    }
    let member = Member::this(team);
    let (query_blocks, blocks) = (counts.shape(2), counts.shape(3));
    let (tile, list_row) = (item % tiles, item / tiles);
    let steps = q_len.div_ceil(queries) * head_groups;
    let first_block = tile * keys / 64;
    let end_block = min(tile * keys + keys, k_len).div_ceil(64usize);
    let mut written = 0usize;
    for partial in 0..2usize {
        let mut start = 0usize;
        while start < steps {
            let own = start + member.lane;
            let (query_tile, heads) = (own / head_groups, own % head_groups);
            let mut sum = 0u32;
            let mut pairs = 0u32;
            if own < steps {
                let row = list_row * rows_each + min(heads, rows_each - 1);
                let first = query_tile * queries;
                let last = min(first + queries, q_len);
                for query_block in first / 16..last.div_ceil(16usize) {
                    let rows = min(q_len - query_block * 16, 16usize);
                    for block in first_block..end_block {
                        sum += counts[(row * query_blocks + query_block) * blocks + block];
                        pairs += (rows * min(k_len - block * 64, 64usize)) as u32;
                    }
                }
                // Rows behind the last query see nothing.
                if first + queries > q_len {
                    pairs += 1u32;
                }
            }
            // Two comparisons: not every code generator compares booleans.
            let mut wanted = sum == pairs && sum > 0;
            if partial == 1 {
                wanted = sum != pairs && sum > 0;
            }
            let bits = ballot(wanted, team);
            let before = sum_up_to(u32::cast_from(wanted), &member, team) as usize;
            if wanted {
                list[item * steps + written + before - 1] =
                    ((query_tile << HEAD_BITS) | heads) as u32;
            }
            written += bits.count_ones() as usize;
            start += comptime!(team.lanes);
        }
        if member.lane == 0 {
            totals[comptime!(HEADER) + item * 2 + partial] = written as u32;
        }
    }
}

/// How far apart the entries of an axis of `size` are: 0 broadcasts.
#[cube]
fn step(size: u32, each: u32) -> u32 {
    select(size == 1, 0u32, each)
}

/// Sums the gradients of the biases of all kv heads, contiguous `[batch, kv_heads, k_len]`, over the sequences and heads
/// that share a bias, in a fixed order, to `grad`, contiguous `[batch | 1, kv_heads | 1, 1, k_len]`.
pub(super) fn sum_heads(client: &Client, parts: &TensorBinding, grad: &TensorBinding) {
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

/// Buffers as in [`sum_heads`]: one unit an element of `grad`, which is overwritten.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_heads_kernel(parts: &Tensor<f32>, grad: &mut Tensor<f32>, items: usize) {
    let at = ABSOLUTE_POS;
    if at >= items {
        terminate!();
    }
    let (batches, kv_heads, k_len) = (parts.shape(0), parts.shape(1), parts.shape(2));
    let (own_batches, own_heads) = (grad.shape(0), grad.shape(1));
    let (key, row) = (at % k_len, at / k_len);
    let (own_head, own_batch) = (row % own_heads, row / own_heads);
    let mut sum = 0.0f32;
    for batch in 0..batches / own_batches {
        for head in 0..kv_heads / own_heads {
            // One of the two numbers is 0 on each axis.
            let from = (own_batch + batch) * kv_heads + own_head + head;
            sum += parts[from * k_len + key];
        }
    }
    grad[at] = sum;
}
