//! dS of a key tile of the dq kernel.

use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::fragment::pack;
use crate::matrix::logits::{LogitScale, score, sees};
use crate::matrix::mask::is_set;
use crate::matrix::query_tile::TileRow;
use crate::matrix::stages::Stages;
use crate::matrix::wgmma::product::finish;
use cubecl::prelude::*;

/// A lane's data on a row of the query tile of which it holds elements.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LaneRow {
    /// `-log2(e) * lse`.
    pub reference: f32,
    /// Its row sum.
    pub delta: f32,
}

/// dS of a key tile, rounded, as an A operand, from S and from dP, which is in flight while P is computed. This lane
/// holds elements of two rows; if `bp.pattern.has_pair_bias()`, `bias` has their biases. On a `boundary` tile, dS is
/// zero where a row does not see a key; if `bp.pattern.is_planned()`, the words of the rows say which they see.
#[cube]
pub(crate) fn gradients<E: Float, NS: Size, NP: Size>(
    s: &Vector<f32, NS>,
    dp: Vector<f32, NS>,
    row0: &TileRow,
    row1: &TileRow,
    upper: &LaneRow,
    lower: &LaneRow,
    seen0: Vector<u32, Const<2>>,
    seen1: Vector<u32, Const<2>>,
    stages: &Stages<E>,
    tile: usize,
    k_len: usize,
    logit_scale: &LogitScale,
    bias: &Vector<f32, NS>,
    #[comptime] boundary: bool,
    #[comptime] bp: MmaBlueprint,
) -> Vector<u32, NP> {
    let quad = UNIT_POS_X as usize % 4;
    // P, times the softcap's slope.
    let mut p = Vector::<f32, NS>::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(bp.key_tile / 8) {
        #[unroll]
        for e in 0..2usize {
            let z = score::<E>(stages, tile, comptime!(n * 8 + e) + quad * 2, bp);
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let (capped, scored) = comptime!((
                bp.softcap,
                bp.pattern.has_intervals()
                    || bp.pattern.has_key_bias()
                    || bp.pattern.has_pair_bias()
            ));
            let mut z0 = z;
            let mut z1 = z;
            if comptime!(bp.pattern.has_pair_bias()) {
                z0 = bias.extract(at0);
                z1 = bias.extract(at1);
            }
            let mut p0 = logit_scale.weight(s.extract(at0), z0, upper.reference, capped, scored);
            let mut p1 = logit_scale.weight(s.extract(at1), z1, lower.reference, capped, scored);
            if comptime!(bp.softcap) {
                let x0 = logit_scale.apply(s.extract(at0), 0.0f32, bp.softcap);
                let x1 = logit_scale.apply(s.extract(at1), 0.0f32, bp.softcap);
                p0 *= logit_scale.slope(x0, bp.softcap);
                p1 *= logit_scale.slope(x1, bp.softcap);
            }
            p.insert(at0, p0);
            p.insert(at1, p1);
        }
    }
    let dp = finish::<NS>(dp, comptime!(bp.key_tile / 2));
    let mut packed = Vector::<u32, NP>::new(0u32);
    #[unroll]
    for n in 0..comptime!(bp.key_tile / 8) {
        let mut ds = Vector::<f32, Const<4>>::new(0.0f32);
        #[unroll]
        for e in 0..2usize {
            let col = comptime!(n * 8 + e) + quad * 2;
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let mut ds0 = p.extract(at0) * (dp.extract(at0) - upper.delta);
            let mut ds1 = p.extract(at1) * (dp.extract(at1) - lower.delta);
            if comptime!(boundary && bp.pattern.is_planned()) {
                ds0 = select(is_set(seen0, comptime!(n * 8 + e)), ds0, 0.0f32);
                ds1 = select(is_set(seen1, comptime!(n * 8 + e)), ds1, 0.0f32);
            } else if comptime!(boundary) {
                ds0 = select(sees::<E>(row0, stages, tile, col, k_len, bp), ds0, 0.0f32);
                ds1 = select(sees::<E>(row1, stages, tile, col, k_len, bp), ds1, 0.0f32);
            }
            ds.insert(e, ds0);
            ds.insert(comptime!(2 + e), ds1);
        }
        #[unroll]
        for half in 0..2usize {
            let (x, y) = comptime!((half * 2, half * 2 + 1));
            let pair = pack(ds.extract(x), ds.extract(y), comptime!(bp.element));
            packed.insert(comptime!(n * 2 + half), pair);
        }
    }
    packed
}
