//! Forward attention on tensor cores: `mma.sync` over key tiles that `cp.async` gathers.

use crate::args::Scaling;
use crate::matrix::args::{KeySource, LaunchedTiles, Operands, Outputs};
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::fragment::{
    gathered, multiply_pair, quad_max, quad_sum, scale_rows, set, set_all, swizzle, zeros,
};
use crate::matrix::key_stream::KeyCopies;
use crate::matrix::logits::{LogitScale, SLACK, exp_of, rescale_to, score, sees, visible_logits};
use crate::matrix::mask::{BitCopies, MaskRows};
use crate::matrix::pair_bias::PairBias;
use crate::matrix::ptx::{any_lane, commit_copies, wait_copies};
use crate::matrix::query_tile::{CubeTile, TileRow, first_output_head, score_row};
use crate::matrix::repair::{add_not_finite, zero_not_finite};
use crate::matrix::stages::{RowAddress, Stages};
use crate::matrix::tile_keys::TileKeys;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// One cube owns one query tile of `bp.heads` query heads that share a kv head: the tile
/// `first_tile + CUBE_COUNT_X - 1 - CUBE_POS_X`, the longest first, of the heads from
/// `CUBE_POS_Y * bp.heads` on, counted over all sequences. A warp owns 16 of its rows: their queries,
/// logits, probabilities, running maximum and sum, and their output stay in its registers. All warps
/// copy the key tiles and share them.
///
/// | buffer | layout |
/// |---|---|
/// | `operands.q` | `[batch, q_heads, q_len, head_dim]`, strides in steps of 2 elements |
/// | `operands.k`, `operands.v` | `[batch, kv_heads, k_len, head_dim]`, strides and begin in steps of 16 bytes |
/// | `source.scores` | `[batch, kv_heads, k_len]`, last axis contiguous |
/// | `source.intervals` | contiguous `[batch, kv_heads, k_len]`, pairs of first and end |
/// | `source.list`, `source.counts` | key lists of the launched tiles, see [`TileKeyLists`](crate::pattern::intervals::TileKeyLists) |
/// | `outputs.out` | contiguous `[batch, q_heads, q_len, head_dim]`, overwritten |
/// | `outputs.lse` | contiguous `[batch, q_heads, q_len]`, overwritten |
///
/// Without `bp.pattern.has_intervals()` the scores, intervals, list and counts are never read; with
/// `bp.pattern.is_planned()`, `bp.pattern.has_key_bias()` or `bp.pattern.has_pair_bias()` they have the meaning
/// described in [`mask`](crate::matrix::mask).
///
/// If `bp.split`, `CUBE_COUNT_Z` cubes share a tile. Each owns a part of its key tiles and writes the output
/// and LSE of that part to `out[CUBE_POS_Z]` and `lse[CUBE_POS_Z]`, outputs as above with parts as a first
/// axis, for [`merge`](crate::forward::merge) to combine.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_mma_kernel<E: Float, O: Float>(
    operands: &Operands<E, Const<2>>,
    source: &KeySource,
    outputs: &mut Outputs<O>,
    scaling: &Scaling,
    tiles_of: &LaunchedTiles,
    #[comptime] bp: MmaBlueprint,
    #[define(E)] _element: ElemType,
    #[define(O)] _output: ElemType,
) {
    let chunks = comptime!(bp.chunks());
    let key_tile = comptime!(bp.key_tile);
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let quad = lane % 4;
    let (q_heads, q_len) = (operands.q.shape(1), operands.q.shape(2));
    let (kv_heads, k_len) = (operands.k.shape(1), operands.k.shape(2));

    let cube = CubeTile::new(q_heads, kv_heads, tiles_of.first, tiles_of.count, bp).planned(
        &source.list,
        &source.counts,
        bp,
    );
    let (batch, tile, first_head) = (cube.batch, cube.tile, cube.first_head);
    let (kv_head, kv_row) = (cube.kv_head, cube.kv_row);
    let keys = TileKeys::new(&source.list, &source.counts, &cube, q_len, k_len, bp).part(bp);
    let upper_row = warp * 16 + lane / 4;
    let row0 = TileRow::new(upper_row, tile, first_head, q_len, k_len, bp).starting_at(keys.begin);
    let row1 =
        TileRow::new(upper_row + 8, tile, first_head, q_len, k_len, bp).starting_at(keys.begin);

    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let size!(NB) = def.vector_size(MatrixIdent::B);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let size!(NS) = comptime!(bp.key_tile / 2);

    let mut q_rows = Sequence::<Array<Vector<E, NA>>>::new();
    let at0 = (batch * operands.q.stride(0)
        + row0.head * operands.q.stride(1)
        + row0.query * operands.q.stride(2))
        / 2
        + quad;
    let at1 = (batch * operands.q.stride(0)
        + row1.head * operands.q.stride(1)
        + row1.query * operands.q.stride(2))
        / 2
        + quad;
    #[unroll]
    for c in 0..comptime!(bp.chunks() / 2) {
        let mut a = Array::<Vector<E, NA>>::new(4usize);
        #[unroll]
        for half in 0..2usize {
            let mut upper = Vector::<E, Const<2>>::new(E::from_int(0));
            let mut lower = Vector::<E, Const<2>>::new(E::from_int(0));
            if row0.valid {
                upper = operands.q[at0 + comptime!(c * 8 + half * 4)];
            }
            if row1.valid {
                lower = operands.q[at1 + comptime!(c * 8 + half * 4)];
            }
            a[comptime!(half * 2)] = Vector::cast_from(upper);
            a[comptime!(half * 2 + 1)] = Vector::cast_from(lower);
        }
        q_rows.push(a);
    }

    let mut stages = Stages::<E>::new(bp);
    let mut mark = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        mark[0] = 0u32;
    }
    let k_rows = RowAddress::of::<E>(&operands.k, batch, kv_head).starting_at(keys.begin);
    let v_rows = RowAddress::of::<E>(&operands.v, batch, kv_head).starting_at(keys.begin);
    let mask = MaskRows::new(&source.list, &source.counts, &cube, &keys, q_len, k_len, bp);
    let score_row = score_row(&source.scores, &cube, bp);
    let bias = PairBias::new(&source.scores, &cube, bp);
    let logit_scale = LogitScale::new(scaling, bp.softcap);

    let mut acc = zeros::<NC>(chunks);
    let mut max0 = f32::new(f32::NEG_INFINITY);
    let mut max1 = f32::new(f32::NEG_INFINITY);
    let mut sum0 = 0.0f32;
    let mut sum1 = 0.0f32;

    let log2e = comptime!(core::f32::consts::LOG2_E);
    let full_tiles = keys.full / key_tile;
    let tiles = keys.total.div_ceil(key_tile);
    let bits = BitCopies::new::<E>(
        &source.intervals,
        &source.list,
        &mask,
        &keys,
        &stages,
        q_len,
        bp,
    );
    let mut copies =
        KeyCopies::new::<E, Const<2>>(operands, source, &k_rows, &v_rows, &keys, bits, &stages, bp);
    // Copies run `stages - 1` turns ahead of the products. Every turn closes one group of copies, an
    // empty one past the end, so that the number of groups under way says which tile has landed.
    let ahead = comptime!(bp.stages - 1);
    for turn in 0..tiles + ahead {
        if turn >= ahead {
            // This unit's part of the tile has landed; after the barrier, every unit's has, and every warp is done with
            // the stage that is filled next.
            wait_copies(comptime!(bp.stages as u32 - 2));
            let mut careful = turn - ahead >= full_tiles;
            if comptime!(bp.pattern.is_planned()) {
                careful = careful && mask.careful;
            }
            if careful && zero_not_finite::<E>(&mut stages.v, turn - ahead, true, bp) {
                mark[0] = 1u32;
            }
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
                bp,
            );
        }
        commit_copies();

        if turn >= ahead {
            let tile = turn - ahead;
            let base = tile % comptime!(bp.stages) * comptime!(bp.key_tile * bp.chunks());
            let boundary = tile >= full_tiles;

            // S = Q K^T: 16 rows by `key_tile` per warp.
            let mut s = zeros::<NC>(comptime!(bp.key_tile / 8));
            #[unroll]
            for c in 0..comptime!(bp.chunks() / 2) {
                #[unroll]
                for n in 0..comptime!(bp.key_tile / 16) {
                    let row = comptime!(n * 16) + lane / 16 * 8 + lane % 8;
                    let at = base + swizzle(row, comptime!(c * 2) + lane / 8 % 2, chunks);
                    multiply_pair::<E, NA, NB, NC>(
                        &def,
                        &q_rows[c],
                        &stages.k[at..at + 1],
                        &mut s,
                        comptime!(n * 16),
                        false,
                    );
                }
            }

            // Logits, and the new maxima of the two rows.
            let mut new0 = max0;
            let mut new1 = max1;
            if comptime!(bp.hides_apart()) {
                let mut seen0 = Vector::<u32, Const<2>>::new(0u32);
                let mut seen1 = Vector::<u32, Const<2>>::new(0u32);
                if comptime!(bp.pattern.is_planned()) {
                    // The intervals of a full tile were not copied.
                    if boundary {
                        seen0 = mask.words::<E>(&stages, &row0, tile, bp);
                        seen1 = mask.words::<E>(&stages, &row1, tile, bp);
                    }
                }
                let products = gathered::<NC, NS>(&s, comptime!(bp.key_tile / 8));
                let logits = visible_logits::<E, NS>(
                    &products,
                    &stages,
                    source,
                    &keys,
                    tile,
                    &row0,
                    &row1,
                    seen0,
                    seen1,
                    boundary,
                    &logit_scale,
                    &bias,
                    q_len,
                    k_len,
                    bp,
                );
                #[unroll]
                for n in 0..comptime!(bp.key_tile / 8) {
                    #[unroll]
                    for e in 0..2usize {
                        new0 = max(new0, logits.extract(comptime!(n * 4 + e)));
                        new1 = max(new1, logits.extract(comptime!(n * 4 + 2 + e)));
                    }
                }
                set_all::<NC, NS>(&mut s, &logits, comptime!(bp.key_tile / 8));
            } else {
                #[unroll]
                for n in 0..comptime!(bp.key_tile / 8) {
                    let mut upper = s[n][0];
                    let mut lower = s[n][1];
                    #[unroll]
                    for e in 0..2usize {
                        let col = comptime!(n * 8 + e) + quad * 2;
                        let z = score::<E>(&stages, tile, col, bp);
                        let mut x0 = logit_scale.apply(upper.extract(e), z, bp.softcap);
                        let mut x1 = logit_scale.apply(lower.extract(e), z, bp.softcap);
                        if boundary {
                            let none = f32::new(f32::NEG_INFINITY);
                            x0 = select(sees::<E>(&row0, &stages, tile, col, k_len, bp), x0, none);
                            x1 = select(sees::<E>(&row1, &stages, tile, col, k_len, bp), x1, none);
                        }
                        new0 = max(new0, x0);
                        new1 = max(new1, x1);
                        upper.insert(e, x0);
                        lower.insert(e, x1);
                    }
                    set(&mut s[n], 0usize, upper);
                    set(&mut s[n], 1usize, lower);
                }
            }
            new0 = quad_max(new0);
            new1 = quad_max(new1);
            let none = f32::new(f32::NEG_INFINITY);
            if any_lane(new0 > max0 + SLACK || new1 > max1 + SLACK) {
                // A row that has seen no key yet rescales zeros, by any finite factor.
                let rescale0 = rescale_to(max0, new0);
                let rescale1 = rescale_to(max1, new1);
                max0 = new0;
                max1 = new1;
                sum0 *= rescale0;
                sum1 *= rescale1;
                scale_rows(&mut acc, rescale0, rescale1, chunks);
            }
            // A row that has seen no key yet: against any finite reference its probabilities are 0.
            let reference0 = select(max0 == none, 0.0f32, -max0 * log2e);
            let reference1 = select(max1 == none, 0.0f32, -max1 * log2e);

            // O += P V, 16 keys at a time.
            #[unroll]
            for n in 0..comptime!(bp.key_tile / 16) {
                let mut p = Array::<Vector<E, NA>>::new(4usize);
                #[unroll]
                for half in 0..2usize {
                    let mut upper = s[comptime!(n * 2 + half)][0];
                    let mut lower = s[comptime!(n * 2 + half)][1];
                    #[unroll]
                    for e in 0..2usize {
                        let p0 = exp_of(upper.extract(e), reference0);
                        let p1 = exp_of(lower.extract(e), reference1);
                        sum0 += p0;
                        sum1 += p1;
                        upper.insert(e, p0);
                        lower.insert(e, p1);
                    }
                    p[comptime!(half * 2)] = Vector::cast_from(upper);
                    p[comptime!(half * 2 + 1)] = Vector::cast_from(lower);
                }
                #[unroll]
                for c in 0..comptime!(bp.chunks() / 2) {
                    let row = comptime!(n * 16) + lane % 16;
                    let at = base + swizzle(row, comptime!(c * 2) + lane / 16, chunks);
                    multiply_pair::<E, NA, NB, NC>(
                        &def,
                        &p,
                        &stages.v[at..at + 1],
                        &mut acc,
                        comptime!(c * 16),
                        true,
                    );
                }
            }
        }
    }

    sum0 = quad_sum(sum0);
    sum1 = quad_sum(sum1);
    // No key at all, or none with a logit above -inf: zeros and an LSE of -inf. NaN stays NaN.
    let empty0 = sum0 == 0.0f32;
    let empty1 = sum1 == 0.0f32;
    scale_rows(
        &mut acc,
        select(empty0, 0.0f32, 1.0f32 / sum0),
        select(empty1, 0.0f32, 1.0f32 / sum1),
        chunks,
    );
    let none = f32::new(f32::NEG_INFINITY);
    let out_head = first_output_head(batch, operands.q.shape(0), q_heads, bp);
    let to0 = (out_head + row0.head) * q_len + row0.query;
    let to1 = (out_head + row1.head) * q_len + row1.query;
    #[unroll]
    for c in 0..chunks {
        if row0.valid {
            outputs.out[to0 * comptime!(bp.head_dim / 2) + comptime!(c * 4) + quad] =
                Vector::cast_from(acc[c][0]);
        }
        if row1.valid {
            outputs.out[to1 * comptime!(bp.head_dim / 2) + comptime!(c * 4) + quad] =
                Vector::cast_from(acc[c][1]);
        }
    }
    if quad == 0 {
        if row0.valid {
            outputs.lse[to0] = select(empty0, none, max0 + sum0.ln());
        }
        if row1.valid {
            outputs.lse[to1] = select(empty1, none, max1 + sum1.ln());
        }
    }
    sync_cube();
    if mark[0] == 1u32 && (UNIT_POS as usize) < comptime!(bp.tile_rows()) {
        let row = TileRow::new(UNIT_POS as usize, tile, first_head, q_len, k_len, bp)
            .starting_at(keys.begin);
        let q_row = (batch * operands.q.stride(0)
            + row.head * operands.q.stride(1)
            + row.query * operands.q.stride(2))
            / 2;
        add_not_finite::<E, O, Const<2>>(
            operands,
            source,
            outputs,
            &row,
            &keys,
            &k_rows,
            &v_rows,
            q_row,
            score_row,
            kv_row * k_len,
            (out_head + row.head) * q_len + row.query,
            full_tiles * key_tile,
            &mask,
            &bias,
            &logit_scale,
            2usize,
            bp,
        );
    }
}
