//! What one tile of keys gives to dQ.

use super::blueprint::{DQ_BLOCK, DqBlueprint};
use super::finite::{pick, zero_not_finite};
use super::operands::{Fragments, load_a};
use crate::forward::mma::{LogitScale, Stages, TileRow, exp_of, score, sees};
use crate::tile::is_finite;
use crate::tile::mma::{Accumulators, Chunk, multiply_pair, set, swizzle, zeros};
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// The two rows of a fragment that this lane holds parts of.
#[derive(CubeType, Clone, Copy)]
pub(super) struct LaneRows {
    pub upper: TileRow,
    pub lower: TileRow,
    /// `-log2(e)` times the LSE.
    pub reference0: f32,
    pub reference1: f32,
    pub delta0: f32,
    pub delta1: f32,
}

/// Adds what the keys of tile `tile` give to dQ. Without `boundary` every row selects every key.
#[cube]
pub(super) fn add_tile<E: Float, NA: Size, NB: Size, NC: Size>(
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
