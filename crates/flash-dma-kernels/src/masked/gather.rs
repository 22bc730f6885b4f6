//! The rest of the [lists](super::lists): bits of gathered keys, the order of tiles, and a look at values.

use super::args::MaskBits;
use super::lists::Sizes;
use crate::forward::mma::{HEADER, TILE_WORDS};
use crate::scratch::{cubes, one_unit_each};
use crate::team::{Member, Team, sum_of};
use crate::tile::mma::Chunk;
use crate::tile::{address_type, elem_type, is_finite};
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use flash_dma_problem::{ElementType, PlanGeometry};

/// Cubes that share the bits of a tile.
const PARTS: usize = 8;

/// Units a cube: planes that each pack a part.
const PLANES: usize = 8;

/// Packs the bits of all gathered lists, and gives tiles their turns.
pub(super) fn launch_gather(
    client: &Client,
    address: AddressType,
    geometry: &PlanGeometry,
    plan: &MaskBits,
    [list, totals]: [&TensorBinding; 2],
    sizes: Sizes,
) {
    let [_, _, bit_blocks, bit_queries, _] = geometry.bits_shape();
    let team = Team::new(client, PLANES);
    // SAFETY: cubes past the tiles return; the lists hold keys below `k_len`, and have room for their bits.
    unsafe {
        gather_kernel::launch_unchecked(
            client,
            cubes(client, sizes.items * PARTS, team.cube_dim()),
            team.cube_dim(),
            address,
            plan.bits.clone().into_buffer_arg(),
            list.clone().into_buffer_arg(),
            totals.clone().into_buffer_arg(),
            sizes.items,
            sizes.tiles,
            sizes.queries,
            sizes.capacity(),
            sizes.room,
            geometry.q_len,
            geometry.k_len,
            bit_blocks,
            bit_queries,
            geometry.causal,
            team,
        );
    }
}

/// Cube `CUBE_POS` packs part `CUBE_POS % PARTS` of the bits of tile `CUBE_POS / PARTS`, if its keys are gathered: a
/// unit a word of 32 slots of one query. `list` and `totals` are those of [`TileLists`](super::lists::TileLists), `bits`
/// the plan's, as words. The first plane of the first part counts the tiles with longer lists: that is the tile's turn.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_kernel(
    bits: &[u32],
    list: &mut [u32],
    totals: &mut [u32],
    items: usize,
    tiles: usize,
    queries: usize,
    capacity: usize,
    room: usize,
    q_len: usize,
    k_len: usize,
    bit_blocks: usize,
    bit_queries: usize,
    #[comptime] causal: bool,
    #[comptime] team: Team,
) {
    let (item, part) = (CUBE_POS / PARTS, CUBE_POS % PARTS);
    if item >= items {
        terminate!();
    }
    let (row, tile) = (item / tiles, item % tiles);
    let at = HEADER + item * TILE_WORDS;
    let slots = totals[at + 1];
    let member = Member::this(team);
    if part == 0 && member.plane == 0 {
        let first = HEADER + row * tiles * TILE_WORDS;
        let mut longer = 0u32;
        let mut other = member.lane;
        while other < tiles {
            let others = totals[first + other * TILE_WORDS + 1];
            longer += u32::cast_from(others > slots || (others == slots && other > tile));
            other += comptime!(team.lanes);
        }
        let turn = sum_of(longer, team) as usize;
        if member.lane == 0 {
            totals[first + turn * TILE_WORDS + 3] = tile as u32;
        }
    }
    if totals[at + 2] == 1u32 {
        let begin = item * capacity;
        let base = row * bit_blocks * bit_queries;
        let mut block_step = 0usize;
        let mut query_step = 0usize;
        if bit_blocks > 1 {
            block_step = bit_queries;
        }
        if bit_queries > 1 {
            query_step = 1usize;
        }
        let keys = slots as usize;
        // Whole steps of two words.
        let words = keys.div_ceil(64usize) * 2;
        let mut index = part * comptime!(team.units()) + UNIT_POS as usize;
        while index < words * queries {
            let (word, own) = (index / queries, index % queries);
            let query = min(tile * queries + own, q_len - 1);
            let mut end = k_len as i32;
            if comptime!(causal) {
                end = query as i32 + 1 + k_len as i32 - q_len as i32;
            }
            let mut packed = 0u32;
            for quarter in 0..4usize {
                #[unroll]
                for n in 0..8usize {
                    let bit = quarter * 8 + n;
                    let slot = word * 32 + bit;
                    let key = list[begin + min(slot, keys - 1)] as usize;
                    let from = (base + key / 64 * block_step + query * query_step) * 2;
                    let seen = bits[from + key % 64 / 32] >> (key % 32) as u32;
                    let there = slot < keys && (key as i32) < end;
                    packed |= select(there, seen & 1u32, 0u32) << bit as u32;
                }
            }
            list[begin + room + (word / 2 * queries + own) * 2 + word % 2] = packed;
            index += comptime!(PARTS * team.units());
        }
    }
}

/// Rows that a unit of [`mark_kernel`] looks at.
const ROWS: usize = 8;

/// Marks in the header of `totals` whether some value of `rows`, `[batch, heads, len, head_dim]`, is not finite.
pub(super) fn mark_not_finite(
    client: &Client,
    rows: &TensorBinding,
    element: ElementType,
    totals: &TensorBinding,
) {
    let [batch, heads, len, head_dim] = rows.shape[..] else {
        unreachable!("checked to have four axes")
    };
    let chunks = head_dim / 8;
    let items = batch * heads * len.div_ceil(ROWS) * chunks;
    let (grid, dim) = one_unit_each(client, items);
    // SAFETY: units past the rows return; the rows were checked to hold their shape.
    unsafe {
        mark_kernel::launch_unchecked(
            client,
            grid,
            dim,
            address_type(&[rows], element.size()),
            rows.clone().into_tensor_arg(),
            totals.clone().into_buffer_arg(),
            items,
            chunks,
            elem_type(element),
        );
    }
}

/// A unit looks at one chunk of [`ROWS`] rows of one head.
#[cube(launch_unchecked, address_type = "dynamic")]
fn mark_kernel<E: Float>(
    rows: &Tensor<Chunk<E>>,
    totals: &mut [u32],
    items: usize,
    chunks: usize,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at >= items {
        terminate!();
    }
    let (heads, len) = (rows.shape(1), rows.shape(2));
    let groups = len.div_ceil(ROWS);
    let (col, group, head) = (at % chunks, at / chunks % groups, at / chunks / groups);
    let base = (head / heads * rows.stride(0) + head % heads * rows.stride(1)) / 8 + col;
    let mut finite = true;
    #[unroll]
    for n in 0..ROWS {
        let row = min(group * ROWS + n, len - 1);
        let values = rows[base + row * rows.stride(2) / 8];
        #[unroll]
        for e in 0..8usize {
            finite = finite && is_finite(f32::cast_from(values.extract(e)));
        }
    }
    if !finite {
        totals[2] = 1u32;
    }
}
