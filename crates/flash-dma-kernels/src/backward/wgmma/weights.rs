//! P and dS of a step of the dk/dv kernel.

use crate::backward::mma::{DkdvBlueprint, OwnKey, Step, Tiles, query_of};
use crate::forward::mma::{LogitScale, exp_of};
use crate::tile::wgmma::pack;
use cubecl::prelude::*;

/// What the products of a step are weighted with: a warpgroup's 64 keys are rows, the query tile's rows columns.
#[derive(CubeType, Clone, Copy)]
pub(super) struct StepWeights<NP: Size> {
    /// `P^T` and `dS^T`, rounded, as A operands.
    pub p: Vector<u32, NP>,
    pub ds: Vector<u32, NP>,
    /// What this lane holds of the score gradients of its two keys: sums over the steps.
    pub dz0: f32,
    pub dz1: f32,
}

/// Sets the weights to those of a step whose `products` are `S^T` and behind it `dP^T`. On a `boundary` step those of
/// pairs that are not selected are zero.
#[cube]
pub(super) fn step_weights<E: Float, NS: Size, NP: Size>(
    weights: &mut StepWeights<NP>,
    products: &Vector<f32, NS>,
    key0: &OwnKey,
    key1: &OwnKey,
    tiles: &Tiles<E>,
    stage: usize,
    step: &Step,
    logit_scale: &LogitScale,
    #[comptime] boundary: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let quad = UNIT_POS_X as usize % 4;
    let log2e = comptime!(core::f32::consts::LOG2_E);
    let mut p = Vector::<u32, NP>::new(0u32);
    let mut ds = Vector::<u32, NP>::new(0u32);
    let mut dz0 = 0.0f32;
    let mut dz1 = 0.0f32;
    #[unroll]
    for n in 0..comptime!(bp.rows / 8) {
        let mut ps = Vector::<f32, Const<4>>::new(0.0f32);
        let mut dss = Vector::<f32, Const<4>>::new(0.0f32);
        #[unroll]
        for e in 0..2usize {
            let row = comptime!(n * 8 + e) + quad * 2;
            let at = stage * comptime!(bp.rows) + row;
            let reference = -tiles.lse[at] * log2e;
            let row_delta = tiles.delta[at];
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let (dp0, dp1) = comptime!((bp.rows / 2 + at0, bp.rows / 2 + at1));
            let x0 = logit_scale.apply(products.extract(at0), key0.score, bp.softcap);
            let x1 = logit_scale.apply(products.extract(at1), key1.score, bp.softcap);
            let mut p0 = exp_of(x0, reference);
            let mut p1 = exp_of(x1, reference);
            let mut ds0 = p0 * (products.extract(dp0) - row_delta);
            let mut ds1 = p1 * (products.extract(dp1) - row_delta);
            if comptime!(boundary) {
                let query = query_of::<E>(tiles, row, stage, step, bp);
                let keep0 = key0.first <= query && query < key0.end;
                let keep1 = key1.first <= query && query < key1.end;
                p0 = select(keep0, p0, 0.0f32);
                p1 = select(keep1, p1, 0.0f32);
                ds0 = select(keep0, ds0, 0.0f32);
                ds1 = select(keep1, ds1, 0.0f32);
            }
            dz0 += ds0;
            dz1 += ds1;
            if comptime!(bp.softcap) {
                ds0 *= logit_scale.slope(x0 - key0.score, bp.softcap);
                ds1 *= logit_scale.slope(x1 - key1.score, bp.softcap);
            }
            ps.insert(e, p0);
            ps.insert(comptime!(2 + e), p1);
            dss.insert(e, ds0);
            dss.insert(comptime!(2 + e), ds1);
        }
        #[unroll]
        for half in 0..2usize {
            let (x, y) = comptime!((half * 2, half * 2 + 1));
            let at = comptime!(n * 2 + half);
            p.insert(
                at,
                pack(ps.extract(x), ps.extract(y), comptime!(bp.element)),
            );
            ds.insert(
                at,
                pack(dss.extract(x), dss.extract(y), comptime!(bp.element)),
            );
        }
    }
    weights.p = p;
    weights.ds = ds;
    weights.dz0 += dz0;
    weights.dz1 += dz1;
}
