//! The gradient of q on tensor cores: query tiles stream the keys they attend to.

use super::blueprint::{DQ_BLOCK, DqBlueprint};
use super::finite::{pick, zero_not_finite};
use super::operands::{Fragments, load_a};
use crate::forward::mma::{LogitScale, exp_of, score};
use crate::forward::mma::{RowAddress, Stages, TileKeys, TileRow, read_keys, sees, start_copies};
use crate::tile::is_finite;
use crate::tile::mma::{
    Accumulators, Chunk, commit_copies, multiply_pair, scale_rows, set, swizzle, wait_copies, zeros,
};
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// One cube owns one query tile of the heads that share a kv head: the tile
/// `first_tile + CUBE_COUNT_X - 1 - CUBE_POS_X`, the longest first, of the heads from
/// `CUBE_POS_Y * heads` on, counted over all sequences. A warp owns 16 of its rows and holds their dQ in
/// registers. All warps copy the key tiles and share them.
///
/// | buffer | layout |
/// |---|---|
/// | `q`, `grad_out` | `[batch, q_heads, q_len, head_dim]`, strides and begin in steps of 16 bytes |
/// | `k`, `v` | `[batch, kv_heads, k_len, head_dim]`, strides and begin in steps of 16 bytes |
/// | `scores` | `[batch, kv_heads, k_len]`, last axis contiguous |
/// | `intervals` | contiguous `[batch, kv_heads, k_len]`, pairs of first and end |
/// | `list`, `counts` | key lists of the launched tiles, see [`TileKeyLists`](crate::lists::TileKeyLists) |
/// | `lse`, `delta` | contiguous `[batch, q_heads, q_len]` |
/// | `grad_q` | contiguous `[batch, q_heads, q_len, head_dim]`, overwritten |
///
/// Without scores the scores, intervals, list and counts are never read.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn dq_mma_kernel<E: Float>(
    q: &Tensor<Chunk<E>>,
    k: &Tensor<Chunk<E>>,
    v: &Tensor<Chunk<E>>,
    grad_out: &Tensor<Chunk<E>>,
    scores: &Tensor<f32>,
    intervals: &[Vector<u32, Const<2>>],
    list: &Tensor<u32>,
    counts: &Tensor<u32>,
    lse: &[f32],
    delta: &[f32],
    grad_q: &mut [Vector<E, Const<2>>],
    scale: f32,
    softcap: f32,
    first_tile: u32,
    cubes: u32,
    #[comptime] bp: DqBlueprint,
    #[define(E)] _element: ElemType,
) {
    let tile_bp = comptime!(bp.tile);
    let chunks = comptime!(tile_bp.chunks());
    let key_tile = comptime!(tile_bp.key_tile);
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let quad = lane % 4;
    let (q_heads, q_len) = (q.shape(1), q.shape(2));
    let (kv_heads, k_len) = (k.shape(1), k.shape(2));

    let head = CUBE_POS_Y as usize * comptime!(tile_bp.heads);
    let batch = head / q_heads;
    let kv_head = head % q_heads / (q_heads / kv_heads);
    let kv_row = batch * kv_heads + kv_head;
    // The last tiles see the most keys: they start first.
    let local = cubes as usize - 1 - CUBE_POS_X as usize;
    let tile = first_tile as usize + local;
    let mut place = 0usize;
    if comptime!(tile_bp.causal) {
        place = local;
    }
    let keys = TileKeys::new(list, counts, kv_row, tile, place, q_len, k_len, tile_bp);
    let first_head = head % q_heads;

    let mut stages = Stages::<E>::new(tile_bp);
    let k_rows = RowAddress::of::<E>(k, batch, kv_head);
    let v_rows = RowAddress::of::<E>(v, batch, kv_head);
    let score_row = batch * scores.stride(0) + kv_head * scores.stride(1);
    let logit_scale = LogitScale::new(scale, softcap, tile_bp.softcap);

    let full_tiles = keys.full / key_tile;
    let tiles = keys.total.div_ceil(key_tile);
    let mut next = Array::<u32>::new(comptime!(tile_bp.copies() + 1));
    #[unroll]
    for c in 0..comptime!(tile_bp.copies() + 1) {
        next[c] = 0u32;
    }
    if comptime!(tile_bp.sparse) {
        read_keys(list, &keys, 0usize, &mut next, tile_bp);
    }

    // The rows of Q and dO; those that are no query are zero.
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
            q_chunk =
                q[(batch * q.stride(0) + row.head * q.stride(1) + row.query * q.stride(2)) / 8 + c];
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
        lse0 = lse[to0];
        delta0 = delta[to0];
    }
    if row1.valid {
        lse1 = lse[to1];
        delta1 = delta[to1];
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

    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let size!(NB) = def.vector_size(MatrixIdent::B);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let mut q_rows = Fragments::<E, NA>::new();
    let mut o_rows = Fragments::<E, NA>::new();
    if comptime!(bp.resident) {
        #[unroll]
        for c in 0..comptime!(chunks / 2) {
            q_rows.push(load_a::<E, NA>(&def, &q_tile, 0usize, warp * 16, c, chunks));
            o_rows.push(load_a::<E, NA>(&def, &o_tile, 0usize, warp * 16, c, chunks));
        }
    }

    let mut acc = zeros::<NC>(chunks);
    // Copies run `stages - 1` turns ahead of the products. Every turn closes one group of copies, an
    // empty one past the end, so that the number of groups under way says which tile has landed.
    let ahead = comptime!(tile_bp.stages - 1);
    for turn in 0..tiles + ahead {
        if turn >= ahead {
            // This unit's part of the tile has landed; behind the barrier, every unit's has, and every
            // warp is done with the stage that is filled next.
            wait_copies(comptime!(tile_bp.stages as u32 - 2));
            sync_cube();
        }
        if turn < tiles {
            start_copies::<E>(
                k,
                v,
                scores,
                intervals,
                &k_rows,
                &v_rows,
                score_row,
                kv_row * k_len,
                &keys,
                turn,
                &next,
                &mut stages,
                tile_bp,
            );
            if comptime!(tile_bp.sparse) {
                read_keys(list, &keys, turn + 1, &mut next, tile_bp);
            }
        }
        commit_copies();

        if turn >= ahead {
            let tile = turn - ahead;
            // Two bodies: without a branch inside, the one of nearly all tiles is scheduled as a whole.
            if tile < full_tiles {
                add_tile::<E, NA, NB, NC>(
                    &def,
                    &stages,
                    tile,
                    &rows,
                    k_len,
                    &q_tile,
                    &o_tile,
                    &q_rows,
                    &o_rows,
                    &logit_scale,
                    &mut acc,
                    false,
                    bp,
                );
            } else {
                add_tile::<E, NA, NB, NC>(
                    &def,
                    &stages,
                    tile,
                    &rows,
                    k_len,
                    &q_tile,
                    &o_tile,
                    &q_rows,
                    &o_rows,
                    &logit_scale,
                    &mut acc,
                    true,
                    bp,
                );
            }
        }
    }

    // A row without any logit above -inf has no gradient.
    let none = f32::new(f32::NEG_INFINITY);
    scale_rows(&mut acc, scale, scale, chunks);
    #[unroll]
    for c in 0..chunks {
        let at = comptime!(c * 4) + quad;
        let zero = Vector::new(0.0f32);
        if rows.upper.valid {
            grad_q[to0 * comptime!(tile_bp.head_dim / 2) + at] =
                Vector::cast_from(select(lse0 == none, zero, acc[c][0]));
        }
        if rows.lower.valid {
            grad_q[to1 * comptime!(tile_bp.head_dim / 2) + at] =
                Vector::cast_from(select(lse1 == none, zero, acc[c][1]));
        }
    }
}

/// The two rows of a fragment that this lane holds parts of.
#[derive(CubeType, Clone, Copy)]
struct LaneRows {
    upper: TileRow,
    lower: TileRow,
    /// `-log2(e)` times the LSE.
    reference0: f32,
    reference1: f32,
    delta0: f32,
    delta1: f32,
}

/// Adds what the keys of tile `tile` give to dQ. Without `boundary` every row selects every key.
#[cube]
fn add_tile<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    stages: &Stages<E>,
    tile: usize,
    rows: &LaneRows,
    k_len: usize,
    q_tile: &Shared<[Chunk<E>]>,
    o_tile: &Shared<[Chunk<E>]>,
    q_rows: &Fragments<E, NA>,
    o_rows: &Fragments<E, NA>,
    logit_scale: &LogitScale,
    acc: &mut Accumulators<NC>,
    #[comptime] boundary: bool,
    #[comptime] bp: DqBlueprint,
) {
    let tile_bp = comptime!(bp.tile);
    let (chunks, key_tile) = comptime!((tile_bp.chunks(), tile_bp.key_tile));
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let quad = lane % 4;
    let base = tile % comptime!(tile_bp.stages) * comptime!(tile_bp.key_tile * tile_bp.chunks());
    #[unroll]
    for block in 0..comptime!(key_tile / DQ_BLOCK) {
        // S = Q K^T and dP = dO V^T: 16 rows by a block of keys a warp.
        let mut s = zeros::<NC>(comptime!(DQ_BLOCK / 8));
        let mut dp = zeros::<NC>(comptime!(DQ_BLOCK / 8));
        #[unroll]
        for c in 0..comptime!(chunks / 2) {
            let mut q_part = Fragments::<E, NA>::new();
            let mut o_part = Fragments::<E, NA>::new();
            if comptime!(!bp.resident) {
                q_part.push(load_a::<E, NA>(def, q_tile, 0usize, warp * 16, c, chunks));
                o_part.push(load_a::<E, NA>(def, o_tile, 0usize, warp * 16, c, chunks));
            }
            #[unroll]
            for n in 0..comptime!(DQ_BLOCK / 16) {
                let row = comptime!(block * DQ_BLOCK + n * 16) + lane / 16 * 8 + lane % 8;
                let at = base + swizzle(row, comptime!(c * 2) + lane / 8 % 2, chunks);
                let (k_at, v_at) = (&stages.k[at..at + 1], &stages.v[at..at + 1]);
                let column = comptime!(n * 16);
                if comptime!(bp.resident) {
                    multiply_pair::<E, NA, NB, NC>(def, &q_rows[c], k_at, &mut s, column, false);
                    multiply_pair::<E, NA, NB, NC>(def, &o_rows[c], v_at, &mut dp, column, false);
                } else {
                    multiply_pair::<E, NA, NB, NC>(def, &q_part[0], k_at, &mut s, column, false);
                    multiply_pair::<E, NA, NB, NC>(def, &o_part[0], v_at, &mut dp, column, false);
                }
            }
        }

        // A key with an element that is not finite makes its logits so, in every row.
        let mut finite = true;
        if comptime!(boundary) {
            #[unroll]
            for n in 0..comptime!(DQ_BLOCK / 8) {
                #[unroll]
                for e in 0..2usize {
                    finite = finite && is_finite(s[n][0].extract(e));
                    finite = finite && is_finite(s[n][1].extract(e));
                }
            }
            finite = plane_all(finite);
        }

        // dS, 16 keys at a time, and dQ += dS K.
        #[unroll]
        for n in 0..comptime!(DQ_BLOCK / 16) {
            let mut ds = Array::<Vector<E, NA>>::new(4usize);
            #[unroll]
            for half in 0..2usize {
                let mut upper = s[comptime!(n * 2 + half)][0];
                let mut lower = s[comptime!(n * 2 + half)][1];
                let dp_upper = dp[comptime!(n * 2 + half)][0];
                let dp_lower = dp[comptime!(n * 2 + half)][1];
                #[unroll]
                for e in 0..2usize {
                    let col = comptime!(block * DQ_BLOCK + n * 16 + half * 8 + e) + quad * 2;
                    let z = score::<E>(stages, tile, col, tile_bp);
                    let x0 = logit_scale.apply(upper.extract(e), z, tile_bp.softcap);
                    let x1 = logit_scale.apply(lower.extract(e), z, tile_bp.softcap);
                    let p0 = exp_of(x0, rows.reference0);
                    let p1 = exp_of(x1, rows.reference1);
                    let mut ds0 = p0 * (dp_upper.extract(e) - rows.delta0);
                    let mut ds1 = p1 * (dp_lower.extract(e) - rows.delta1);
                    if comptime!(tile_bp.softcap) {
                        ds0 *= logit_scale.slope(x0 - z, tile_bp.softcap);
                        ds1 *= logit_scale.slope(x1 - z, tile_bp.softcap);
                    }
                    if comptime!(boundary) {
                        ds0 = select(
                            sees::<E>(&rows.upper, stages, tile, col, k_len, tile_bp),
                            ds0,
                            0.0f32,
                        );
                        ds1 = select(
                            sees::<E>(&rows.lower, stages, tile, col, k_len, tile_bp),
                            ds1,
                            0.0f32,
                        );
                    }
                    upper.insert(e, ds0);
                    lower.insert(e, ds1);
                }
                ds[comptime!(half * 2)] = Vector::cast_from(upper);
                ds[comptime!(half * 2 + 1)] = Vector::cast_from(lower);
            }
            let first_row = comptime!(block * DQ_BLOCK + n * 16);
            if comptime!(boundary) {
                if finite {
                    multiply_keys::<E, NA, NB, NC>(def, &ds, stages, base, acc, first_row, bp);
                } else {
                    add_finite::<E, NA, NB, NC>(
                        def, &ds, stages, base, tile, rows, k_len, acc, first_row, bp,
                    );
                }
            } else {
                multiply_keys::<E, NA, NB, NC>(def, &ds, stages, base, acc, first_row, bp);
            }
        }
    }
}

/// `acc += ds * K` over 16 keys.
#[cube]
fn multiply_keys<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    ds: &Array<Vector<E, NA>>,
    stages: &Stages<E>,
    base: usize,
    acc: &mut Accumulators<NC>,
    #[comptime] first_row: usize,
    #[comptime] bp: DqBlueprint,
) {
    let chunks = comptime!(bp.tile.chunks());
    let lane = UNIT_POS_X as usize;
    #[unroll]
    for c in 0..comptime!(chunks / 2) {
        let at = base + swizzle(first_row + lane % 16, comptime!(c * 2) + lane / 16, chunks);
        multiply_pair::<E, NA, NB, NC>(
            def,
            ds,
            &stages.k[at..at + 1],
            acc,
            comptime!(c * 16),
            true,
        );
    }
}

/// `acc += ds * K` over the finite elements of 16 keys; in a row that selects a key, the elements where
/// that key is not finite become NaN: such a key's logit is not finite, hence `ds` is zero or NaN.
#[cube]
fn add_finite<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    ds: &Array<Vector<E, NA>>,
    stages: &Stages<E>,
    base: usize,
    tile: usize,
    rows: &LaneRows,
    k_len: usize,
    acc: &mut Accumulators<NC>,
    #[comptime] first_row: usize,
    #[comptime] bp: DqBlueprint,
) {
    let chunks = comptime!(bp.tile.chunks());
    let lane = UNIT_POS_X as usize;
    #[unroll]
    for c in 0..comptime!(chunks / 2) {
        let at = base + swizzle(first_row + lane % 16, comptime!(c * 2) + lane / 16, chunks);
        let r = def.load_matrix::<_, NB>(&stages.k[at..at + 1], MatrixIdent::B, 4usize, true);
        let mut first = Array::<Vector<E, NB>>::new(2usize);
        let mut second = Array::<Vector<E, NB>>::new(2usize);
        first[0] = r[0];
        first[1] = r[1];
        second[0] = r[2];
        second[1] = r[3];
        zero_not_finite::<E, NB>(&mut first);
        zero_not_finite::<E, NB>(&mut second);
        def.execute_inplace(ds, &first, &mut acc[comptime!(c * 2)]);
        def.execute_inplace(ds, &second, &mut acc[comptime!(c * 2 + 1)]);
    }
    let nan = f32::new(f32::NAN);
    for n in 0..16usize {
        let slot = first_row + n;
        let see0 = sees::<E>(&rows.upper, stages, tile, slot, k_len, bp.tile);
        let see1 = sees::<E>(&rows.lower, stages, tile, slot, k_len, bp.tile);
        #[unroll]
        for c in 0..chunks {
            let pair = pick::<E>(stages.k[base + swizzle(slot, c, chunks)], lane % 4);
            let mut upper = acc[c][0];
            let mut lower = acc[c][1];
            #[unroll]
            for e in 0..2usize {
                let broken = !is_finite(pair.extract(e));
                if broken && see0 {
                    upper.insert(e, nan);
                }
                if broken && see1 {
                    lower.insert(e, nan);
                }
            }
            set(&mut acc[c], 0usize, upper);
            set(&mut acc[c], 1usize, lower);
        }
    }
}
