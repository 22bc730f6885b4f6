//! Which key blocks a tile of queries sees.

use super::args::MaskBits;
use crate::forward::mma::HEADER;
use crate::scratch::{address_type, cubes, scratch};
use crate::team::{Member, Team, ballot, sum_up_to};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::PlanGeometry;

/// The key blocks that each query tile sees, for every row of the mask.
///
/// A list holds first the blocks that the tile sees whole, then those it sees in part, both ascending.
#[derive(Clone, Debug)]
pub(crate) struct BlockLists {
    /// `[batch, heads, tiles, capacity]` of the mask, u32: block indices; past the total undefined.
    pub list: TensorBinding,
    /// [`HEADER`] words, the key blocks and queries of the bits, then `[batch, heads, tiles, 2]`, u32: the number of
    /// whole blocks, and of all.
    pub counts: TensorBinding,
}

/// Lists the blocks of tiles of `queries` queries, in one launch.
pub(crate) fn block_lists(
    client: &Client,
    geometry: &PlanGeometry,
    plan: &MaskBits,
    queries: usize,
) -> BlockLists {
    let [batch, heads, _, blocks] = geometry.counts_shape();
    let [_, _, bit_blocks, bit_queries, _] = geometry.bits_shape();
    let tiles = geometry.q_len.div_ceil(queries);
    let list = scratch(client, [batch, heads, tiles, blocks]);
    let counts = scratch(client, [HEADER + batch * heads * tiles * 2]);
    let team = Team::new(client, 1);
    let items = batch * heads * tiles;
    // SAFETY: cubes past the tiles return; the list has an entry for every block, and the plan was checked.
    unsafe {
        list_kernel::launch_unchecked(
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
            geometry.q_len,
            geometry.k_len,
            bit_blocks as u32,
            bit_queries as u32,
            team,
        );
    }
    BlockLists { list, counts }
}

/// A cube lists the blocks of one tile: tile `CUBE_POS % tiles` of row `CUBE_POS / tiles` of the mask.
///
/// `counts` is the plan's `[batch, heads, query_blocks, key_blocks]`; `list` is contiguous `[rows, tiles, key_blocks]`,
/// `totals` as in [`BlockLists`].
#[cube(launch_unchecked, address_type = "dynamic")]
fn list_kernel(
    counts: &Tensor<u32>,
    list: &mut Tensor<u32>,
    totals: &mut Tensor<u32>,
    items: usize,
    tiles: usize,
    queries: usize,
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
        totals[0] = bit_blocks;
        totals[1] = bit_queries;
    }
    let (query_blocks, blocks) = (counts.shape(2), counts.shape(3));
    let (tile, row) = (item % tiles, item / tiles);
    let first = tile * queries;
    let last = min(first + queries, q_len);
    let member = Member::this(team);
    let mut written = 0usize;
    for partial in 0..2usize {
        let mut start = 0usize;
        while start < blocks {
            let block = start + member.lane;
            let mut sum = 0u32;
            let mut pairs = 0u32;
            if block < blocks {
                let keys = min(k_len - block * 64, 64usize);
                for query_block in first / 16..last.div_ceil(16usize) {
                    sum += counts[(row * query_blocks + query_block) * blocks + block];
                    pairs += (min(q_len - query_block * 16, 16usize) * keys) as u32;
                }
                // A last block of fewer keys is never whole: what lies behind it is tested away.
                if keys < 64 {
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
                list[item * blocks + written + before - 1] = block as u32;
            }
            written += bits.count_ones() as usize;
            start += comptime!(team.lanes);
        }
        if member.lane == 0 {
            totals[comptime!(HEADER) + item * 2 + partial] = written as u32;
        }
    }
}
