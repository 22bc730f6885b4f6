//! The gradient of the rank by `mma.sync`.
//!
//! The kernel uses the parts of the dk/dv kernel, with two products per pair instead of four and one number per key
//! instead of two rows: the two warps of a pair own the same keys and take one half of the rows of each query tile, so
//! that each makes both products of its pairs and none waits for another inside a tile.

use crate::alibi::biased;
use crate::args::Scaling;
use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::mma::keys::{LaneKeys, local_key};
use crate::backward::dkdv::mma::queries::{
    Tiles, UnusualLses, copy_number, copy_step, enter_alibi, lse_of, query_of,
};
use crate::backward::dkdv::shared::alibi::{local_place, row_alibi};
use crate::backward::dkdv::shared::args::{BackwardInputs, KeyGrid, KeyTileSource};
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::keys::copy_keys;
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::backward::dkdv::shared::queries::{Pairs, QueryRows, Step, StepLses};
use crate::backward::dkdv::shared::steps::{Cursor, StepOrder};
use crate::backward::products::Products;
use crate::backward::rank::terms::write_or_add;
use crate::matrix::fragment::quad_sum;
use crate::matrix::logit_scale::is_unusual;
use crate::matrix::mma::{LanePlace, load_a, multiply};
use crate::matrix::ptx::{commit_copies, shared_address, wait_copies};
use crate::rank_terms::RankTerms;
use cubecl::prelude::*;

/// One cube owns one tile of the keys of a kv head and of a chunk of queries, see [`of_ranked`](ChunkTile::of_ranked).
/// It streams the chunk's queries that train the rank of one of its keys, of every head of the group, and writes the
/// gradients of its keys' ranks. With `bp.shared_keys` it adds to them instead, as does the launch for kept keys, which
/// runs after the one for runners-up. With `x` a pair's logit minus the LSE, a gradient is the sum of
/// `sigmoid(x) * grad_out . (v - out) + grad_lse * softplus(x)`; that of a kept key is given at
/// [`OWN_OUTPUT_WEIGHT`](flash_dma_problem::OWN_OUTPUT_WEIGHT).
///
/// | buffer | layout |
/// |---|---|
/// | `inputs` | as in the dk/dv kernel |
/// | `terms` | see [`RankTerms`] |
/// | `source` | scores, and as intervals the spans and lists of [`RankedKeys`](crate::pattern::intervals::ranked::RankedKeys) |
/// | `rank` | contiguous `[batch, kv_heads, k_len]`; the listed keys are overwritten or added to |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn rank_mma_kernel<E: Float>(
    inputs: &BackwardInputs<E>,
    terms: &RankTerms,
    source: &KeyTileSource,
    rank: &mut [f32],
    scaling: &Scaling,
    grid: &KeyGrid,
    #[comptime] bp: DkdvBlueprint,
    #[define(E)] _element: ElemType,
) {
    let place = ChunkTile::of_ranked::<E>(inputs, source, grid, bp);
    let mut tiles = Tiles::<E>::new(bp);
    let mut of_lse = Shared::<[f32]>::new_aligned_slice(comptime!(bp.stages * bp.rows), 128usize);
    tiles.bounds.enter(source, &place, bp);
    enter_alibi::<E>(&mut tiles, inputs, source, &place, bp);
    sync_cube();

    let order = StepOrder::of_cube(source, grid, &place, &tiles.bounds, bp);
    let pairs = Pairs::new::<E>(inputs, &place, KeyMask::none(), scaling, bp);
    let size!(NS) = comptime!(bp.products().values());
    let size!(NA) = comptime!(4 * bp.fragments);
    let mut sums = Array::<f32>::new(comptime!(bp.fragments * 2));
    #[unroll]
    for n in 0..comptime!(bp.fragments * 2) {
        sums[n] = 0.0f32;
    }
    if order.count > 0 {
        copy_keys::<E>(inputs, source, &place, &mut tiles.k, &mut tiles.v, bp);
        let first = order.first(bp);
        copy_step::<E>(inputs, &pairs.rows, &first, 0usize, &mut tiles, bp);
        copy_lse_gradients(terms, &pairs.rows, &first, 0usize, &mut of_lse, bp);
        commit_copies();
        let keys = LaneKeys::new(source, &place, &pairs);
        let of_lse = &mut of_lse;
        stream_queries::<E, NS, NA>(
            inputs, terms, &pairs, &order, &mut tiles, of_lse, &keys, &mut sums,
        );
    }
    write_sums(source, &place, &sums, rank, comptime!(terms.adds), bp);
}

/// Starts the copies of the gradients of the LSEs of step `step`, at `cursor`, if there are some.
#[cube]
fn copy_lse_gradients(
    terms: &RankTerms,
    rows: &QueryRows,
    cursor: &Cursor,
    step: usize,
    to: &mut Shared<[f32]>,
    #[comptime] bp: DkdvBlueprint,
) {
    #[comptime]
    match &terms.grad_lse {
        ComptimeOption::Some(grad_lse) => {
            let unit = UNIT_POS as usize;
            let queries = comptime!(bp.queries());
            if unit < comptime!(bp.rows) {
                let place = step % comptime!(bp.stages) * comptime!(bp.rows) + unit;
                let query = cursor.tile * queries + unit % queries;
                let there = unit < comptime!(bp.queries() * bp.heads) && query < rows.len;
                let from = rows.row + (cursor.head + unit / queries) * rows.len + query;
                copy_number::<f32>(grad_lse, from, to, place, there);
            }
        }
        ComptimeOption::None => {}
    }
}

/// Streams the queries of a cube's steps, the first of which is in flight together with the keys.
#[cube]
fn stream_queries<E: Float, NS: Size, NA: Size>(
    inputs: &BackwardInputs<E>,
    terms: &RankTerms,
    pairs: &Pairs,
    order: &StepOrder,
    tiles: &mut Tiles<E>,
    of_lse: &mut Shared<[f32]>,
    keys: &LaneKeys,
    sums: &mut Array<f32>,
) {
    let (rows, bp) = (&pairs.rows, comptime!(pairs.bp));
    let shape = comptime!(bp.products());
    let segments = comptime!(bp.segments());
    let (a_place, b_place) = (LanePlace::rows(segments), LanePlace::columns(segments));
    let pair = UNIT_POS_Y % comptime!(bp.role_warps as u32);
    let half = UNIT_POS_Y / comptime!(bp.role_warps as u32);
    let own = pair * comptime!((2 * bp.warp_keys() * bp.head_dim) as u32);
    let own_rows = half * comptime!((2 * bp.product_rows() * bp.head_dim) as u32);
    let k_tile = shared_address(&tiles.k[0..1]) + own;
    let v_tile = shared_address(&tiles.v[0..1]) + own;
    let q_tile = shared_address(&tiles.q[0..1]) + own_rows;
    let o_tile = shared_address(&tiles.grad_out[0..1]) + own_rows;
    wait_copies(0u32);
    sync_cube();
    let mut k = Array::<Vector<u32, NA>>::new(comptime!(bp.head_dim / 16));
    let mut v = Array::<Vector<u32, NA>>::new(comptime!(bp.head_dim / 16));
    #[unroll]
    for c in 0..comptime!(bp.head_dim / 16) {
        k[c] = load_a::<NA>(k_tile, &a_place, comptime!(shape.at(16 * c)));
        v[c] = load_a::<NA>(v_tile, &a_place, comptime!(shape.at(16 * c)));
    }
    let mut next = order.first(bp);
    for turn in 0..order.count {
        let query = next.tile * comptime!(bp.queries());
        let mut head = 0usize;
        if comptime!(bp.slopes > 0) {
            // Copied, because the cursor moves on.
            head = next.head;
        }
        // This unit's part of the tile has landed; after the barrier, every unit's has, and no warp needs the stage
        // that is filled next.
        wait_copies(0u32);
        sync_cube();
        if turn + 1 < order.count {
            next.advance(&order.range, bp);
            copy_step::<E>(inputs, rows, &next, turn + 1, tiles, bp);
            copy_lse_gradients(terms, rows, &next, turn + 1, of_lse, bp);
        }
        commit_copies();
        let stage = (turn % comptime!(bp.stages)) as u32 * comptime!(bp.stage_bytes());
        let mut s = Vector::<f32, NS>::new(0.0f32);
        let mut dp = Vector::<f32, NS>::new(0.0f32);
        #[unroll]
        for c in 0..comptime!(bp.head_dim / 16) {
            let shape = comptime!(shape.at(16 * c));
            s = multiply::<NS, NA>(s, k[c], q_tile + stage, &b_place, shape);
            dp = multiply::<NS, NA>(dp, v[c], o_tile + stage, &b_place, shape);
        }
        let at = step_at::<E>(turn, query, head, order, &*tiles, bp);
        let of_lse = &*of_lse;
        let products = Products::<NS> { s, dp };
        let step = RankStep { turn, at };
        // Two loop bodies, as in the dk/dv kernel.
        if step.at.boundary {
            let lses = StepLses::of::<E>(inputs, &step.at, turn, order, rows, bp);
            add_changes::<E, NS>(
                &products, &lses, &step, &*tiles, of_lse, keys, sums, terms, true,
            );
        } else {
            let lses = StepLses::none::<E>(inputs);
            add_changes::<E, NS>(
                &products, &lses, &step, &*tiles, of_lse, keys, sums, terms, false,
            );
        }
    }
}

/// A step of a cube, and its turn.
#[derive(CubeType)]
struct RankStep {
    turn: usize,
    at: Step,
}

/// Step `turn`, which begins at query `query` of head `head` of the group, and whose tile is in its stage. Rows that are
/// not finite need no treatment: no product has weights of zero.
#[cube]
fn step_at<E: Float>(
    turn: usize,
    query: usize,
    head: usize,
    order: &StepOrder,
    tiles: &Tiles<E>,
    #[comptime] bp: DkdvBlueprint,
) -> Step {
    let base = turn % comptime!(bp.stages) * comptime!(bp.rows);
    let mut row = UNIT_POS_X as usize;
    let mut unusual = false;
    while row < comptime!(bp.rows) {
        unusual = unusual || is_unusual(tiles.lse[base + row]);
        row += 32;
    }
    let unusual = plane_any(unusual);
    let mut large = false;
    if unusual {
        large = UnusualLses::find::<E>(tiles, turn, bp).large;
    }
    Step {
        query,
        head,
        boundary: !order.is_full(turn, query, bp) || unusual,
        large,
        not_finite: false,
    }
}

/// Adds the contributions of a step to the sums of this lane's keys, from the products `K Q^T` and `V dO^T`.
#[cube]
fn add_changes<E: Float, NS: Size>(
    products: &Products<NS>,
    lses: &StepLses,
    step: &RankStep,
    tiles: &Tiles<E>,
    of_lse: &Shared<[f32]>,
    keys: &LaneKeys,
    sums: &mut Array<f32>,
    terms: &RankTerms,
    #[comptime] boundary: bool,
) {
    let bp = comptime!(keys.bp);
    let with_lse = terms.grad_lse.is_some();
    let at = &step.at;
    let stage = step.turn % comptime!(bp.stages);
    let half = UNIT_POS_Y as usize / comptime!(bp.role_warps);
    let first_row = half * comptime!(bp.product_rows()) + UNIT_POS_X as usize % 4 * 2;
    // First and end of the queries that train the ranks of this lane's keys.
    let mut bounds = Array::<i32>::new(comptime!(bp.fragments * 4));
    if comptime!(boundary) {
        #[unroll]
        for n in 0..comptime!(bp.fragments * 2) {
            bounds[n * 2] = tiles.bounds.first[local_key(n, bp)];
            bounds[n * 2 + 1] = tiles.bounds.end[local_key(n, bp)];
        }
    }
    #[unroll]
    for n in 0..comptime!(bp.product_rows() / 8) {
        #[unroll]
        for e in 0..2usize {
            let row = first_row + comptime!(n * 8 + e);
            let here = stage * comptime!(bp.rows) + row;
            let lse = lse_of::<E>(lses, tiles, row, stage, at, boundary, bp);
            let mut mean = tiles.delta[here];
            let mut grad = 0.0f32;
            if comptime!(with_lse) {
                grad = of_lse[here];
                mean += grad;
            }
            let alibi = row_alibi(&tiles.slopes, at, row, bp);
            let mut query = 0i32;
            if comptime!(boundary) {
                query = query_of::<E>(tiles, row, stage, at, bp);
            }
            #[unroll]
            for key in 0..comptime!(bp.fragments * 2) {
                let (_, first) = comptime!(bp.products().place(key / 2, n));
                let value = comptime!(first + key % 2 * 2 + e);
                let place = local_place(&tiles.places, local_key(key, bp));
                let z = biased(&alibi, keys.score(key), place);
                let power = lse.exponent(keys.logit(products.s.extract(value), z));
                let power = terms.change.above(power);
                let weight = terms.change.weight_of_power(power);
                let mut change = weight * (products.dp.extract(value) - mean);
                if comptime!(with_lse) {
                    let above = power * comptime!(core::f32::consts::LN_2);
                    change = fma(grad, terms.change.part_of_lse(above, weight), change);
                }
                if comptime!(boundary) {
                    let runs = bounds[key * 2] <= query && query < bounds[key * 2 + 1];
                    change = select(runs, change, 0.0f32);
                }
                sums[key] += change;
            }
        }
    }
}

/// Writes the sums of both halves of every pair of warps, or adds them if `adds`. All units of the cube take part.
#[cube]
fn write_sums(
    source: &KeyTileSource,
    place: &ChunkTile,
    sums: &Array<f32>,
    rank: &mut [f32],
    #[comptime] adds: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let mut second = Shared::<[f32]>::new_aligned_slice(comptime!(bp.keys()), 128usize);
    let half = UNIT_POS_Y / comptime!(bp.role_warps as u32);
    let quad = UNIT_POS_X % 4;
    let writes = quad == 0;
    let left = place.count - place.start;
    let mut own = Array::<f32>::new(comptime!(bp.fragments * 2));
    #[unroll]
    for n in 0..comptime!(bp.fragments * 2) {
        own[n] = quad_sum(sums[n]);
        if writes && half == 1 {
            second[local_key(n, bp)] = own[n];
        }
    }
    sync_cube();
    #[unroll]
    for n in 0..comptime!(bp.fragments * 2) {
        let local = local_key(n, bp);
        if writes && half == 0 && local < left {
            let row = place.row_of(source, local, bp);
            write_or_add(rank, row, own[n] + second[local], adds, bp);
        }
    }
}
