//! The contribution of one key tile to dQ.

use crate::backward::blueprint::{DQ_BLOCK, DqBlueprint};
use crate::backward::dq::rows::LaneRows;
use crate::finite::{NO_NUMBER, exponent_bits};
use crate::matrix::attended::AttendedKeys;
use crate::matrix::fragment::pack;
use crate::matrix::logits::{exp_of, score, sees};
use crate::matrix::mask::is_set;
use crate::matrix::mma::product::{LanePlace, Shape, load_a, multiply};
use crate::matrix::stages::Stages;
use crate::pattern::layout::KEY_BLOCK;
use cubecl::prelude::*;

/// The operands of a warp's products, as addresses in shared memory.
#[derive(CubeType)]
pub(crate) struct TileOperands<NA: Size> {
    /// The warp's 16 rows of Q and dO.
    pub q: u32,
    pub o: u32,
    /// Their fragments, one per step of 16 columns; only with `bp.resident`.
    pub q_rows: Sequence<Vector<u32, NA>>,
    pub o_rows: Sequence<Vector<u32, NA>>,
    /// The stages of keys and values.
    pub k: u32,
    pub v: u32,
    /// This lane's contribution to the addresses of fragments.
    pub rows: LanePlace,
    pub columns: LanePlace,
}

/// Adds the contribution of the keys of tile `tile` to dQ (`head_dim / 32` accumulators of 32 columns). Without
/// `boundary` every row selects every key; with it, the mask, if there is one, says which keys a row selects. Returns
/// whether all keys are finite, as far as this warp can tell: non-finite elements of a key add nothing here, which is
/// left to [`mark_pair`](crate::backward::dq::repair::mark_pair).
#[cube]
pub(crate) fn add_tile<E: Float, N: Size, NA: Size>(
    stages: &Stages<E>,
    tile: usize,
    rows: &LaneRows,
    attended: &AttendedKeys,
    operands: &TileOperands<NA>,
    acc: &mut Array<Vector<f32, N>>,
    #[comptime] boundary: bool,
    #[comptime] bp: DqBlueprint,
) -> bool {
    let tile_bp = comptime!(bp.tile);
    let mask = &attended.mask;
    let logit_scale = &attended.scale;
    let k_len = attended.own.k_len;
    let (head_dim, key_tile) = comptime!((tile_bp.head_dim, tile_bp.key_tile));
    let steps = comptime!(head_dim / 16);
    let row_bytes = comptime!(2 * tile_bp.head_dim as u32);
    let shape = comptime!(bp.products());
    let by_rows = comptime!(Shape {
        transposed: true,
        ..shape
    });
    let by_finite_rows = comptime!(Shape {
        cleaned: true,
        ..by_rows
    });
    let quad = UNIT_POS_X as usize % 4;
    let stage = (tile % comptime!(tile_bp.stages) * key_tile) as u32 * row_bytes;
    let mut all_finite = true;
    // The words of the two rows.
    let mut seen0 = Vector::<u32, Const<2>>::new(0u32);
    let mut seen1 = Vector::<u32, Const<2>>::new(0u32);
    if comptime!(boundary && tile_bp.pattern.is_planned()) {
        seen0 = mask.words::<E>(stages, &rows.pair.upper, tile, tile_bp);
        seen1 = mask.words::<E>(stages, &rows.pair.lower, tile, tile_bp);
    }
    // Not unrolled at boundaries: that code is long and rarely runs.
    #[unroll(!boundary)]
    for block in 0..comptime!(key_tile / DQ_BLOCK) {
        let first = block * DQ_BLOCK;
        let begin = stage + first as u32 * row_bytes;
        let (k_keys, v_keys) = (operands.k + begin, operands.v + begin);
        // S = Q K^T and dP = dO V^T: 16 rows by a block of keys per warp.
        let mut s = Vector::<f32, N>::new(0.0f32);
        let mut dp = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for c in 0..steps {
            let shape = comptime!(shape.at(16 * c));
            if comptime!(bp.resident) {
                let (q_rows, o_rows) = (operands.q_rows[c], operands.o_rows[c]);
                s = multiply::<N, NA>(s, q_rows, k_keys, &operands.columns, shape);
                dp = multiply::<N, NA>(dp, o_rows, v_keys, &operands.columns, shape);
            } else {
                let q_rows = load_a::<NA>(operands.q, &operands.rows, shape);
                let o_rows = load_a::<NA>(operands.o, &operands.rows, shape);
                s = multiply::<N, NA>(s, q_rows, k_keys, &operands.columns, shape);
                dp = multiply::<N, NA>(dp, o_rows, v_keys, &operands.columns, shape);
            }
        }

        let mut finite = true;
        if comptime!(boundary && tile_bp.pattern.is_planned()) {
            if mask.not_finite {
                finite = keys_are_finite::<N>(&s);
            }
        } else if comptime!(boundary) {
            finite = keys_are_finite::<N>(&s);
        }
        if comptime!(boundary) {
            all_finite = all_finite && finite;
        }
        // The words of this block.
        let mut own0 = seen0;
        let mut own1 = seen1;
        if comptime!(boundary && tile_bp.pattern.is_planned() && key_tile == KEY_BLOCK) {
            let second = block * DQ_BLOCK >= 32;
            own0.insert(
                0usize,
                select(second, seen0.extract(1usize), seen0.extract(0usize)),
            );
            own1.insert(
                0usize,
                select(second, seen1.extract(1usize), seen1.extract(0usize)),
            );
        }

        // dS, 16 keys at a time, and dQ += dS K.
        #[unroll]
        for n in 0..comptime!(DQ_BLOCK / 16) {
            let mut ds = Vector::<u32, NA>::new(0u32);
            #[unroll]
            for half in 0..2usize {
                let at = comptime!(n * 8 + half * 4);
                let mut upper = Vector::<f32, Const<2>>::new(0.0f32);
                let mut lower = Vector::<f32, Const<2>>::new(0.0f32);
                #[unroll]
                for e in 0..2usize {
                    let col = first + comptime!(n * 16 + half * 8 + e) + quad * 2;
                    let z = score::<E>(stages, tile, col, tile_bp);
                    let (s0, s1) = (
                        s.extract(comptime!(at + e)),
                        s.extract(comptime!(at + 2 + e)),
                    );
                    let dp0: f32 = dp.extract(comptime!(at + e));
                    let dp1: f32 = dp.extract(comptime!(at + 2 + e));
                    let x0 = logit_scale.apply(s0, z, tile_bp.softcap);
                    let x1 = logit_scale.apply(s1, z, tile_bp.softcap);
                    let mut ds0 = exp_of(x0, rows.upper.reference) * (dp0 - rows.upper.delta);
                    let mut ds1 = exp_of(x1, rows.lower.reference) * (dp1 - rows.lower.delta);
                    if comptime!(tile_bp.softcap && tile_bp.pattern.has_key_bias()) {
                        // A bias may be infinite.
                        let capped0 = logit_scale.apply(s0, 0.0f32, tile_bp.softcap);
                        let capped1 = logit_scale.apply(s1, 0.0f32, tile_bp.softcap);
                        ds0 *= logit_scale.slope(capped0, tile_bp.softcap);
                        ds1 *= logit_scale.slope(capped1, tile_bp.softcap);
                    } else if comptime!(tile_bp.softcap) {
                        ds0 *= logit_scale.slope(x0 - z, tile_bp.softcap);
                        ds1 *= logit_scale.slope(x1 - z, tile_bp.softcap);
                    }
                    if comptime!(boundary && tile_bp.pattern.is_planned()) {
                        let column = comptime!(n * 16 + half * 8 + e);
                        ds0 = select(is_set(own0, column), ds0, 0.0f32);
                        ds1 = select(is_set(own1, column), ds1, 0.0f32);
                    } else if comptime!(boundary) {
                        let see0 = sees::<E>(&rows.pair.upper, stages, tile, col, k_len, tile_bp);
                        let see1 = sees::<E>(&rows.pair.lower, stages, tile, col, k_len, tile_bp);
                        ds0 = select(see0, ds0, 0.0f32);
                        ds1 = select(see1, ds1, 0.0f32);
                    }
                    upper.insert(e, ds0);
                    lower.insert(e, ds1);
                }
                let (x, y) = (upper.extract(0usize), upper.extract(1usize));
                ds.insert(comptime!(half * 2), pack(x, y, comptime!(tile_bp.element)));
                let (x, y) = (lower.extract(0usize), lower.extract(1usize));
                ds.insert(
                    comptime!(half * 2 + 1),
                    pack(x, y, comptime!(tile_bp.element)),
                );
            }
            let keys = k_keys + comptime!(n as u32 * 16 * row_bytes);
            if comptime!(boundary) {
                if finite {
                    add_rows::<N, NA>(acc, ds, keys, operands, by_rows);
                } else {
                    add_rows::<N, NA>(acc, ds, keys, operands, by_finite_rows);
                }
            } else {
                add_rows::<N, NA>(acc, ds, keys, operands, by_rows);
            }
        }
    }
    all_finite
}

/// Whether all keys of a block of logits' products are finite: a key with a non-finite element makes its products
/// non-finite in every row.
#[cube]
fn keys_are_finite<N: Size>(products: &Vector<f32, N>) -> bool {
    let mut exponent = 0u32;
    #[unroll]
    for n in 0..comptime!(DQ_BLOCK / 2) {
        exponent = max(exponent, exponent_bits(products.extract(n)));
    }
    plane_all(exponent != NO_NUMBER)
}

/// `acc += ds * K` over the 16 keys whose rows begin at address `keys`.
#[cube]
fn add_rows<N: Size, NA: Size>(
    acc: &mut Array<Vector<f32, N>>,
    ds: Vector<u32, NA>,
    keys: u32,
    operands: &TileOperands<NA>,
    #[comptime] shape: Shape,
) {
    #[unroll]
    for c in 0..comptime!(shape.columns / 32) {
        let shape = comptime!(shape.at(32 * c));
        acc[c] = multiply::<N, NA>(acc[c], ds, keys, &operands.rows, shape);
    }
}
