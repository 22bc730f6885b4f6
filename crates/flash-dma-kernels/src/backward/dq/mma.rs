//! The gradient of q on tensor cores: query tiles stream the keys they attend to.

use crate::args::Scaling;
use crate::backward::blueprint::DqBlueprint;
use crate::backward::dq::tile::{LaneRows, TileOperands, add_tile};
use crate::backward::repair::mark_not_finite;
use crate::matrix::args::{KeySource, LaunchedTiles, Operands, SavedRows};
use crate::matrix::fragment::swizzle;
use crate::matrix::key_stream::KeyCopies;
use crate::matrix::logits::LogitScale;
use crate::matrix::mask::{BitCopies, MaskRows};
use crate::matrix::mma::product::{LanePlace, load_a};
use crate::matrix::ptx::{commit_copies, shared_address, wait_copies};
use crate::matrix::query_tile::{CubeTile, TileRow, score_row};
use crate::matrix::stages::{RowAddress, Stages};
use crate::matrix::tile_keys::TileKeys;
use crate::vectors::Chunk;
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
/// | `source.scores` | `[batch, kv_heads, k_len]`, last axis contiguous |
/// | `source.intervals` | contiguous `[batch, kv_heads, k_len]`, pairs of first and end |
/// | `source.list`, `source.counts` | key lists of the launched tiles, see [`TileKeyLists`](crate::pattern::intervals::TileKeyLists) |
/// | `saved.lse`, `saved.delta` | contiguous `[batch, q_heads, q_len]` |
/// | `grad_q` | contiguous `[batch, q_heads, q_len, head_dim]`, overwritten |
///
/// Without scores the scores, intervals, list and counts are never read; with a mask or a bias they have the meaning
/// described in [`mask`](crate::matrix::mask).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dq_mma_kernel<E: Float>(
    operands: &Operands<E, Const<8>>,
    grad_out: &Tensor<Chunk<E>>,
    source: &KeySource,
    saved: &SavedRows,
    grad_q: &mut [Vector<E, Const<2>>],
    scaling: &Scaling,
    tiles_of: &LaunchedTiles,
    #[comptime] bp: DqBlueprint,
    #[define(E)] _element: ElemType,
) {
    let tile_bp = comptime!(bp.tile);
    let chunks = comptime!(tile_bp.chunks());
    let key_tile = comptime!(tile_bp.key_tile);
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let quad = lane % 4;
    let (q_heads, q_len) = (operands.q.shape(1), operands.q.shape(2));
    let (kv_heads, k_len) = (operands.k.shape(1), operands.k.shape(2));

    let cube = CubeTile::new(q_heads, kv_heads, tiles_of.first, tiles_of.count, tile_bp).planned(
        &source.list,
        &source.counts,
        tile_bp,
    );
    let (batch, tile, first_head) = (cube.batch, cube.tile, cube.first_head);
    let (kv_head, kv_row) = (cube.kv_head, cube.kv_row);
    let keys = TileKeys::new(&source.list, &source.counts, &cube, q_len, k_len, tile_bp);

    let mut stages = Stages::<E>::new(tile_bp);
    let k_rows = RowAddress::of::<E>(&operands.k, batch, kv_head);
    let v_rows = RowAddress::of::<E>(&operands.v, batch, kv_head);
    let score_row = score_row(&source.scores, &cube, tile_bp);
    let logit_scale = LogitScale::new(scaling, tile_bp.softcap);

    let full_tiles = keys.full / key_tile;
    let tiles = keys.total.div_ceil(key_tile);
    let mask = MaskRows::new(
        &source.list,
        &source.counts,
        &cube,
        &keys,
        q_len,
        k_len,
        tile_bp,
    );
    let bits = BitCopies::new::<E>(
        &source.intervals,
        &source.list,
        &mask,
        &keys,
        &stages,
        q_len,
        tile_bp,
    );
    let mut copies = KeyCopies::new::<E, Const<8>>(
        operands, source, &k_rows, &v_rows, &keys, bits, &stages, tile_bp,
    );

    // The rows of Q and dO; rows without a query are zero.
    let tile_rows = comptime!(tile_bp.tile_rows());
    let mut q_tile = Shared::<[Chunk<E>]>::new_aligned_slice(tile_rows * chunks, 128usize);
    let mut o_tile = Shared::<[Chunk<E>]>::new_aligned_slice(tile_rows * chunks, 128usize);
    let mut at = UNIT_POS as usize;
    while at < tile_rows * chunks {
        let (r, c) = (at / chunks, at % chunks);
        let row = TileRow::new(r, tile, first_head, q_len, k_len, tile_bp);
        let mut q_chunk = Vector::new(E::from_int(0));
        let mut o_chunk = Vector::new(E::from_int(0));
        if row.valid {
            q_chunk = operands.q[(batch * operands.q.stride(0)
                + row.head * operands.q.stride(1)
                + row.query * operands.q.stride(2))
                / 8
                + c];
            o_chunk = grad_out[(batch * grad_out.stride(0)
                + row.head * grad_out.stride(1)
                + row.query * grad_out.stride(2))
                / 8
                + c];
        }
        q_tile[swizzle(r, c, chunks)] = q_chunk;
        o_tile[swizzle(r, c, chunks)] = o_chunk;
        at += comptime!(tile_bp.units());
    }
    sync_cube();

    let upper_row = warp * 16 + lane / 4;
    let row0 = TileRow::new(upper_row, tile, first_head, q_len, k_len, tile_bp);
    let row1 = TileRow::new(upper_row + 8, tile, first_head, q_len, k_len, tile_bp);
    let to0 = (batch * q_heads + row0.head) * q_len + row0.query;
    let to1 = (batch * q_heads + row1.head) * q_len + row1.query;
    let mut lse0 = 0.0f32;
    let mut lse1 = 0.0f32;
    let mut delta0 = 0.0f32;
    let mut delta1 = 0.0f32;
    if row0.valid {
        lse0 = saved.lse[to0];
        delta0 = saved.delta[to0];
    }
    if row1.valid {
        lse1 = saved.lse[to1];
        delta1 = saved.delta[to1];
    }
    let log2e = comptime!(core::f32::consts::LOG2_E);
    let rows = LaneRows {
        upper: row0,
        lower: row1,
        reference0: -lse0 * log2e,
        reference1: -lse1 * log2e,
        delta0,
        delta1,
    };

    // Accumulators of 16 rows by 32 columns, and fragments of 16 by 16.
    let size!(N) = 16usize;
    let size!(NA) = 4usize;
    let warp_rows = (warp * comptime!(32 * tile_bp.head_dim)) as u32;
    let places = LanePlace::rows(chunks);
    let q_address = shared_address(&q_tile[0..1]) + warp_rows;
    let o_address = shared_address(&o_tile[0..1]) + warp_rows;
    let mut q_rows = Sequence::<Vector<u32, NA>>::new();
    let mut o_rows = Sequence::<Vector<u32, NA>>::new();
    if comptime!(bp.resident) {
        #[unroll]
        for c in 0..comptime!(chunks / 2) {
            q_rows.push(load_a::<NA>(
                q_address,
                &places,
                comptime!(bp.products().at(16 * c)),
            ));
            o_rows.push(load_a::<NA>(
                o_address,
                &places,
                comptime!(bp.products().at(16 * c)),
            ));
        }
    }
    let tile_operands = TileOperands::<NA> {
        q: q_address,
        o: o_address,
        q_rows,
        o_rows,
        k: shared_address(&stages.k[0..1]),
        v: shared_address(&stages.v[0..1]),
        rows: places,
        columns: LanePlace::columns(chunks),
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
            copies.start::<E>(
                source,
                score_row,
                kv_row * k_len,
                &keys,
                turn,
                &mut stages,
                tile_bp,
            );
        }
        commit_copies();

        if turn >= ahead {
            let tile = turn - ahead;
            // Two loop bodies: without a branch inside, the body of nearly all tiles is scheduled as a whole.
            if tile < full_tiles {
                let _all = add_tile::<E, N, NA>(
                    &stages,
                    tile,
                    &rows,
                    &mask,
                    k_len,
                    &tile_operands,
                    &logit_scale,
                    &mut acc,
                    false,
                    bp,
                );
            } else {
                let finite = add_tile::<E, N, NA>(
                    &stages,
                    tile,
                    &rows,
                    &mask,
                    k_len,
                    &tile_operands,
                    &logit_scale,
                    &mut acc,
                    true,
                    bp,
                );
                all_finite = all_finite && finite;
            }
        }
    }

    // A row without any logit above -inf has no gradient.
    let none = f32::new(f32::NEG_INFINITY);
    #[unroll]
    for c in 0..chunks {
        let at = comptime!(c * 4) + quad;
        let mut upper = Vector::<f32, Const<2>>::new(0.0f32);
        let mut lower = Vector::<f32, Const<2>>::new(0.0f32);
        #[unroll]
        for e in 0..2usize {
            let x0: f32 = acc[comptime!(c / 4)].extract(comptime!(c % 4 * 4 + e));
            let x1: f32 = acc[comptime!(c / 4)].extract(comptime!(c % 4 * 4 + 2 + e));
            upper.insert(e, select(lse0 == none, 0.0f32, x0 * scaling.scale));
            lower.insert(e, select(lse1 == none, 0.0f32, x1 * scaling.scale));
        }
        if rows.upper.valid {
            grad_q[to0 * comptime!(tile_bp.head_dim / 2) + at] = Vector::cast_from(upper);
        }
        if rows.lower.valid {
            grad_q[to1 * comptime!(tile_bp.head_dim / 2) + at] = Vector::cast_from(lower);
        }
    }

    if !all_finite {
        let from = full_tiles * key_tile;
        let intervals_row = kv_row * k_len;
        if rows.upper.valid && lse0 != none {
            mark_not_finite::<E, Const<8>>(
                operands,
                source,
                grad_q,
                &rows.upper,
                &keys,
                &k_rows,
                &mask,
                intervals_row,
                to0,
                from,
                q_len,
                k_len,
                tile_bp,
            );
        }
        if rows.lower.valid && lse1 != none {
            mark_not_finite::<E, Const<8>>(
                operands,
                source,
                grad_q,
                &rows.lower,
                &keys,
                &k_rows,
                &mask,
                intervals_row,
                to1,
                from,
                q_len,
                k_len,
                tile_bp,
            );
        }
    }
}
