//! The second part of the [lists](crate::pattern::mask::tile_lists): bits of gathered keys, the order of tiles, and the
//! check for non-finite values.

use crate::finite::{NO_NUMBER, exponent_bits};
use crate::host::check::{address_type, elem_type};
use crate::host::scratch::cubes;
use crate::pattern::layout::{TILE_LIST_HEADER, TILE_LIST_WORDS};
use crate::pattern::mask::args::MaskBits;
use crate::pattern::mask::sizes::{ListSizes, PLANES, Sizes, TileLists};
use crate::pattern::position::end_key;
use crate::team::{Member, Team, sum_of};
use crate::vectors::Segment;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{ElementType, PlanGeometry};

/// Cubes that share the bits of a tile.
const PARTS: usize = 8;

/// Rows that a unit checks.
const ROWS: usize = 8;

/// Packs the bits of all gathered lists, assigns tiles their turns, and marks in the header whether some value of
/// `watched`, `[batch, heads, len, head_dim]`, is not finite.
pub(crate) fn finish_lists(
    client: &Client,
    geometry: &PlanGeometry,
    plan: &MaskBits,
    watched: &TensorBinding,
    element: ElementType,
    lists: &TileLists,
    sizes: Sizes,
) {
    let [batch, heads, len, head_dim] = watched.shape[..] else {
        unreachable!("checked to have four axes")
    };
    let TileLists { list, counts } = lists;
    let team = Team::new(client, PLANES);
    let segments = head_dim / 8;
    let looks = batch * heads * len.div_ceil(ROWS) * segments;
    let looking = looks.div_ceil(team.units());
    let parts = if sizes.room > 0 { PARTS } else { 1 };
    // SAFETY: units past the rows and cubes past the tiles return; the rows were checked to hold their shape; the lists
    // hold keys below `k_len`, and have room for their bits.
    unsafe {
        finish_kernel::launch_unchecked(
            client,
            cubes(client, looking + sizes.items * parts, team.cube_dim()),
            team.cube_dim(),
            address_type(&[watched], element.size())
                .max(address_type(&[&plan.bits, list, counts], 4)),
            watched.clone().into_tensor_arg(),
            plan.bits.clone().into_buffer_arg(),
            list.clone().into_buffer_arg(),
            counts.clone().into_buffer_arg(),
            GatherSizesLaunch::new(
                looks,
                looking,
                segments,
                sizes.items,
                parts,
                sizes.of_kernels(geometry),
            ),
            geometry.causal,
            team,
            elem_type(element),
        );
    }
}

/// Sizes of a launch of [`finish_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct GatherSizes {
    pub looks: usize,
    pub looking: usize,
    pub segments: usize,
    pub items: usize,
    pub parts: usize,
    pub lists: ListSizes,
}

/// The first `looking` cubes check `rows`; cube `looking + n` packs part `n % parts` of the bits of tile `n / parts`,
/// if its keys are gathered, and the first plane of the first part assigns the tile its turn. `list` and `totals`
/// belong to [`TileLists`], `bits` to the plan, as words.
#[cube(launch_unchecked, address_type = "dynamic")]
fn finish_kernel<E: Float>(
    rows: &Tensor<Segment<E>>,
    bits: &[u32],
    list: &mut [u32],
    totals: &mut [u32],
    sizes: &GatherSizes,
    #[comptime] causal: bool,
    #[comptime] team: Team,
    #[define(E)] _element: ElemType,
) {
    if CUBE_POS < sizes.looking {
        let at = CUBE_POS * comptime!(team.units()) + UNIT_POS as usize;
        if at < sizes.looks && !is_finite_segment::<E>(rows, at, sizes.segments) {
            totals[2] = 1u32;
        }
        terminate!();
    }
    let item = (CUBE_POS - sizes.looking) / sizes.parts;
    let part = (CUBE_POS - sizes.looking) % sizes.parts;
    if item >= sizes.items {
        terminate!();
    }
    let lists = &sizes.lists;
    let (row, tile) = (item / lists.tiles, item % lists.tiles);
    let at = TILE_LIST_HEADER + item * TILE_LIST_WORDS;
    let columns = totals[at + 1];
    let member = Member::this(team);
    if part == 0 && member.plane == 0 {
        // Number of tiles with longer lists.
        let first = TILE_LIST_HEADER + row * lists.tiles * TILE_LIST_WORDS;
        let mut longer = 0u32;
        let mut next = member.lane;
        while next < lists.tiles {
            // Several at once, so that the loads overlap.
            #[unroll]
            for n in 0..8usize {
                let other = next + comptime!(n * team.lanes);
                let others = totals[first + min(other, lists.tiles - 1) * TILE_LIST_WORDS + 1];
                // With equal numbers of columns the later tile comes first.
                let bar = columns + u32::cast_from(other <= tile);
                longer += select(other < lists.tiles, u32::cast_from(others >= bar), 0u32);
            }
            next += comptime!(8 * team.lanes);
        }
        let turn = sum_of(longer, team) as usize;
        if member.lane == 0 {
            totals[first + turn * TILE_LIST_WORDS + 3] = tile as u32;
        }
    }
    if totals[at + 2] == 1u32 {
        let begin = item * lists.capacity;
        let base = row * lists.bit_blocks * lists.bit_queries;
        let mut block_step = 0usize;
        let mut query_step = 0usize;
        if lists.bit_blocks > 1 {
            block_step = lists.bit_queries;
        }
        if lists.bit_queries > 1 {
            query_step = 1usize;
        }
        let keys = columns as usize;
        // Whole steps of two words.
        let words = keys.div_ceil(64usize) * 2;
        // One unit per word of 32 columns of one query.
        let mut index = part * comptime!(team.units()) + UNIT_POS as usize;
        while index < words * lists.queries {
            let (word, own) = (index / lists.queries, index % lists.queries);
            let query = min(tile * lists.queries + own, lists.q_len - 1);
            let end = end_key(query, lists.q_len, lists.k_len, causal);
            let mut packed = 0u32;
            for half in 0..2usize {
                #[unroll]
                for n in 0..16usize {
                    let bit = half * 16 + n;
                    let column = word * 32 + bit;
                    let key = list[begin + min(column, keys - 1)] as usize;
                    let from = (base + key / 64 * block_step + query * query_step) * 2;
                    let seen = bits[from + key % 64 / 32] >> (key % 32) as u32;
                    let there = column < keys && (key as i32) < end;
                    packed |= select(there, seen & 1u32, 0u32) << bit as u32;
                }
            }
            list[begin + lists.room + (word / 2 * lists.queries + own) * 2 + word % 2] = packed;
            index += sizes.parts * comptime!(team.units());
        }
    }
}

/// True if segment `at % segments` of the [`ROWS`] rows of group `at / segments`, counted over all heads, is finite.
#[cube]
fn is_finite_segment<E: Float>(rows: &Tensor<Segment<E>>, at: usize, segments: usize) -> bool {
    let (heads, len) = (rows.shape(1), rows.shape(2));
    let groups = len.div_ceil(ROWS);
    let col = at % segments;
    let group = at / segments % groups;
    let head = at / segments / groups;
    let base = (head / heads * rows.stride(0) + head % heads * rows.stride(1)) / 8 + col;
    let mut greatest = 0u32;
    #[unroll]
    for n in 0..ROWS {
        let row = min(group * ROWS + n, len - 1);
        let values = rows[base + row * rows.stride(2) / 8];
        #[unroll]
        for e in 0..8usize {
            greatest = max(greatest, exponent_bits(f32::cast_from(values.extract(e))));
        }
    }
    greatest != NO_NUMBER
}
