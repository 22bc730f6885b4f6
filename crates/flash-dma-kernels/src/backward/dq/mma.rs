//! The gradient of q on tensor cores: query tiles stream the keys they attend to.

use crate::args::Scaling;
use crate::backward::dq::blueprint::DqBlueprint;
use crate::backward::dq::repair::mark_pair;
use crate::backward::dq::rows::LaneRows;
use crate::backward::dq::tile::{TileOperands, add_tile};
use crate::matrix::args::{KeySource, LaunchedTiles, Operands, SavedRows};
use crate::matrix::attended::AttendedKeys;
use crate::matrix::fragment::swizzle;
use crate::matrix::key_stream::KeyCopies;
use crate::matrix::mma::{LanePlace, load_a};
use crate::matrix::ptx::{commit_copies, shared_address, wait_copies};
use crate::matrix::rows::{CubeTile, TileRow};
use crate::matrix::stages::Stages;
use crate::matrix::tile_keys::TileKeys;
use crate::vectors::Segment;
use cubecl::prelude::*;

/// One cube owns one query tile of the heads that share a kv head: the tile
/// `first_tile + CUBE_COUNT_X - 1 - CUBE_POS_X`, the longest first, of the heads from
/// `CUBE_POS_Y * heads` on, counted over all sequences. A warp owns 16 of its rows and holds their dQ in
/// registers. All warps copy the key tiles and share them.
///
/// | buffer | layout |
/// |---|---|
/// | `operands.q`, `grad_out` | `[batch, q_heads, q_len, head_dim]`, strides and begin in steps of 16 bytes |
/// | `operands.k`, `operands.v` | `[batch, kv_heads, k_len, head_dim]`, strides and begin in steps of 16 bytes |
/// | `source` | which keys, and what is added to their logits: [`KeySource`] |
/// | `saved.lse`, `saved.delta` | contiguous `[batch, q_heads, q_len]` |
/// | `grad_q` | contiguous `[batch, q_heads, q_len, head_dim]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dq_mma_kernel<E: Float>(
    operands: &Operands<E, Const<8>>,
    grad_out: &Tensor<Segment<E>>,
    source: &KeySource,
    saved: &SavedRows,
    grad_q: &mut [Vector<E, Const<2>>],
    scaling: &Scaling,
    tiles_of: &LaunchedTiles,
    #[comptime] bp: DqBlueprint,
    #[define(E)] _element: ElemType,
) {
    let tile_bp = comptime!(bp.tile);
    let segments = comptime!(tile_bp.segments());
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let quad = lane % 4;
    let own = CubeTile::new::<E, Const<8>>(operands, source, tiles_of, tile_bp);
    let keys = TileKeys::new(source, &own);

    let mut stages = Stages::<E>::new(tile_bp);
    let attended = AttendedKeys::new::<E, Const<8>>(operands, source, scaling, own, keys);
    let own = &attended.own;
    let keys = &attended.keys;
    let tiles = keys.tiles(tile_bp);
    let mut copies = KeyCopies::new::<E, Const<8>>(operands, source, &attended, &stages);

    // The rows of Q and dO; rows without a query are zero.
    let tile_segments = comptime!(tile_bp.tile_rows() * tile_bp.segments());
    let mut q_tile = Shared::<[Segment<E>]>::new_aligned_slice(tile_segments, 128usize);
    let mut o_tile = Shared::<[Segment<E>]>::new_aligned_slice(tile_segments, 128usize);
    load_rows::<E>(operands, grad_out, &mut q_tile, &mut o_tile, own);
    sync_cube();
    let rows = LaneRows::read::<E>(saved, source, scaling, &stages, own);
    // Only boundary tiles compute probabilities by exact LSEs.
    let full_tiles = keys.full_tiles(tile_bp);
    let plain_tiles = select(rows.any_large(), 0usize, full_tiles);

    // Accumulators of 16 rows by 32 columns, and fragments of 16 by 16.
    let size!(N) = 16usize;
    let size!(NA) = 4usize;
    let warp_rows = (warp * comptime!(32 * tile_bp.head_dim)) as u32;
    let places = LanePlace::rows(segments);
    let q_address = shared_address(&q_tile[0..1]) + warp_rows;
    let o_address = shared_address(&o_tile[0..1]) + warp_rows;
    let mut q_rows = Sequence::<Vector<u32, NA>>::new();
    let mut o_rows = Sequence::<Vector<u32, NA>>::new();
    if comptime!(bp.resident) {
        #[unroll]
        for c in 0..comptime!(segments / 2) {
            let shape = comptime!(bp.products().at(16 * c));
            q_rows.push(load_a::<NA>(q_address, &places, shape));
            o_rows.push(load_a::<NA>(o_address, &places, shape));
        }
    }
    let addresses = TileOperands::<NA> {
        q: q_address,
        o: o_address,
        q_rows,
        o_rows,
        k: shared_address(&stages.k[0..1]),
        v: shared_address(&stages.v[0..1]),
        rows: places,
        columns: LanePlace::columns(segments),
        bp,
    };

    let mut acc = Array::<Vector<f32, N>>::new(comptime!(tile_bp.head_dim / 32));
    #[unroll]
    for c in 0..comptime!(tile_bp.head_dim / 32) {
        acc[c] = Vector::new(0.0f32);
    }
    let mut all_finite = true;
    // Copies run `stages - 1` iterations ahead of the products. Every iteration commits one group of copies, an empty
    // one past the end, so that the number of groups in flight tells which tile has landed.
    let ahead = comptime!(tile_bp.stages - 1);
    for turn in 0..tiles + ahead {
        if turn >= ahead {
            // This unit's part of the tile has landed; after the barrier, every unit's has, and every warp is done with
            // the stage that is filled next.
            wait_copies(comptime!(tile_bp.stages as u32 - 2));
            sync_cube();
        }
        if turn < tiles {
            copies.start::<E>(source, &attended, turn, &mut stages);
        }
        commit_copies();

        if turn >= ahead {
            let tile = turn - ahead;
            // Two loop bodies: without a branch inside, the body of nearly all tiles is scheduled as a whole.
            if tile < plain_tiles {
                let _all = add_tile::<E, N, NA>(
                    &stages, tile, &rows, saved, &attended, &addresses, &mut acc, false,
                );
            } else {
                let finite = add_tile::<E, N, NA>(
                    &stages, tile, &rows, saved, &attended, &addresses, &mut acc, true,
                );
                all_finite = all_finite && finite;
            }
        }
    }

    // A row without any logit above -inf has no gradient.
    let none = f32::new(f32::NEG_INFINITY);
    #[unroll]
    for c in 0..segments {
        let at = comptime!(c * 4) + quad;
        let mut upper = Vector::<f32, Const<2>>::new(0.0f32);
        let mut lower = Vector::<f32, Const<2>>::new(0.0f32);
        #[unroll]
        for e in 0..2usize {
            let x0: f32 = acc[comptime!(c / 4)].extract(comptime!(c % 4 * 4 + e));
            let x1: f32 = acc[comptime!(c / 4)].extract(comptime!(c % 4 * 4 + 2 + e));
            upper.insert(
                e,
                select(rows.lse.upper == none, 0.0f32, x0 * scaling.scale),
            );
            lower.insert(
                e,
                select(rows.lse.lower == none, 0.0f32, x1 * scaling.scale),
            );
        }
        if rows.to.has_upper {
            grad_q[rows.to.upper * comptime!(tile_bp.head_dim / 2) + at] = Vector::cast_from(upper);
        }
        if rows.to.has_lower {
            grad_q[rows.to.lower * comptime!(tile_bp.head_dim / 2) + at] = Vector::cast_from(lower);
        }
    }
    if !all_finite {
        mark_pair::<E>(operands, source, grad_q, &rows, &attended, plain_tiles);
    }
}

/// Copies the rows of Q and dO of the query tile that a cube owns; rows without a query become zeros.
#[cube]
fn load_rows<E: Float>(
    operands: &Operands<E, Const<8>>,
    grad_out: &Tensor<Segment<E>>,
    q_tile: &mut Shared<[Segment<E>]>,
    o_tile: &mut Shared<[Segment<E>]>,
    own: &CubeTile,
) {
    let bp = comptime!(own.bp);
    let segments = comptime!(bp.segments());
    let mut at = UNIT_POS as usize;
    while at < comptime!(bp.tile_rows() * bp.segments()) {
        let (r, c) = (at / segments, at % segments);
        let row = TileRow::new(r, own);
        let mut q_segment = Vector::new(E::from_int(0));
        let mut o_segment = Vector::new(E::from_int(0));
        if row.valid {
            q_segment = operands.q[own.offset(&operands.q, &row) / 8 + c];
            o_segment = grad_out[own.offset(grad_out, &row) / 8 + c];
        }
        q_tile[swizzle(r, c, segments)] = q_segment;
        o_tile[swizzle(r, c, segments)] = o_segment;
        at += comptime!(bp.units());
    }
}
