//! The weights of pairs: probabilities, and gradients of the logits.

use super::blueprint::{DkdvBlueprint, STAGES};
use super::finite::{add_row, pick};
use super::operands::Fragments;
use super::queries::{Step, Tiles, query_of};
use crate::forward::mma::{LogitScale, exp_of};
use crate::tile::mma::{Accumulators, swizzle};
use cubecl::prelude::*;

/// What a pair's weight says that is not selected.
const NOT_SELECTED: f32 = -1.0;

/// Where this lane's weights of accumulator `n` of fragment `m` are, for step `step`.
#[cube]
pub(super) fn weight_place(
    step: usize,
    n: usize,
    lane: usize,
    #[comptime] m: usize,
    #[comptime] bp: DkdvBlueprint,
) -> usize {
    let warp = step % 2 * comptime!(bp.role_warps) + UNIT_POS_Y as usize % comptime!(bp.role_warps);
    (warp * comptime!(bp.fragments * (bp.rows / 8)) + comptime!(m * (bp.rows / 8)) + n) * 32 + lane
}

/// The probabilities of accumulator `n` of every fragment: to shared memory, and as half `half` of the A
/// fragments `a`.
#[cube]
pub(super) fn probabilities<E: Float, NA: Size, NC: Size>(
    step: usize,
    at: &Step,
    logit_scale: &LogitScale,
    key_scores: &Array<f32>,
    tiles: &mut Tiles<E>,
    s: &Accumulators<NC>,
    a: &mut Fragments<E, NA>,
    bounds: &Array<i32>,
    #[comptime] n: usize,
    #[comptime] half: usize,
    #[comptime] boundary: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let lane = UNIT_POS_X as usize;
    let stage = step % STAGES;
    let row = comptime!(n * 8) + lane % 4 * 2;
    let log2e = comptime!(core::f32::consts::LOG2_E);
    let reference0 = -tiles.lse[stage * comptime!(bp.rows) + row] * log2e;
    let reference1 = -tiles.lse[stage * comptime!(bp.rows) + row + 1] * log2e;
    let mut query0 = 0i32;
    let mut query1 = 0i32;
    if comptime!(boundary) {
        query0 = query_of::<E>(&*tiles, row, stage, at, bp);
        query1 = query_of::<E>(&*tiles, row + 1, stage, at, bp);
    }
    #[unroll]
    for m in 0..comptime!(bp.fragments) {
        let mut weights = Vector::<f32, Const<4>>::new(0.0f32);
        #[unroll]
        for lower in 0..2usize {
            let mut z = 0.0f32;
            if comptime!(bp.sparse) {
                z = key_scores[comptime!(m * 2 + lower)];
            }
            let mut values = s[comptime!(m * (bp.rows / 8) + n)][lower];
            let mut p0 = exp_of(
                logit_scale.apply(values.extract(0usize), z, bp.softcap),
                reference0,
            );
            let mut p1 = exp_of(
                logit_scale.apply(values.extract(1usize), z, bp.softcap),
                reference1,
            );
            if comptime!(boundary) {
                let none = f32::new(NOT_SELECTED);
                let (first, end) = (
                    bounds[comptime!(m * 4 + lower * 2)],
                    bounds[comptime!(m * 4 + lower * 2 + 1)],
                );
                let keep0 = first <= query0 && query0 < end;
                let keep1 = first <= query1 && query1 < end;
                weights.insert(comptime!(lower * 2), select(keep0, p0, none));
                weights.insert(comptime!(lower * 2 + 1), select(keep1, p1, none));
                p0 = select(keep0, p0, 0.0f32);
                p1 = select(keep1, p1, 0.0f32);
            } else {
                weights.insert(comptime!(lower * 2), p0);
                weights.insert(comptime!(lower * 2 + 1), p1);
            }
            values.insert(0usize, p0);
            values.insert(1usize, p1);
            put(
                &mut a[m],
                comptime!(half * 2 + lower),
                Vector::cast_from(values),
            );
        }
        tiles.weights[weight_place(step, n, lane, m, bp)] = weights;
    }
}

/// The gradients of the logits' products of accumulator `n` of every fragment, as half `half` of the A
/// fragments `a`; on broken steps also to shared memory, in the place of the probabilities.
#[cube]
pub(super) fn score_gradients<E: Float, NA: Size, NC: Size>(
    step: usize,
    logit_scale: &LogitScale,
    key_scores: &Array<f32>,
    tiles: &mut Tiles<E>,
    dp: &Accumulators<NC>,
    a: &mut Fragments<E, NA>,
    score_sums: &mut Array<f32>,
    #[comptime] n: usize,
    #[comptime] half: usize,
    #[comptime] boundary: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let lane = UNIT_POS_X as usize;
    let first_row = step % STAGES * comptime!(bp.rows) + comptime!(n * 8) + lane % 4 * 2;
    #[unroll]
    for m in 0..comptime!(bp.fragments) {
        let place = weight_place(step, n, lane, m, bp);
        let mut weights = tiles.weights[place];
        #[unroll]
        for lower in 0..2usize {
            let mut values = dp[comptime!(m * (bp.rows / 8) + n)][lower];
            #[unroll]
            for e in 0..2usize {
                let p = weights.extract(comptime!(lower * 2 + e));
                let mut ds = p * (values.extract(e) - tiles.delta[first_row + e]);
                if comptime!(boundary) {
                    ds = select(p < 0.0f32, 0.0f32, ds);
                }
                score_sums[comptime!(m * 2 + lower)] += ds;
                if comptime!(bp.softcap) {
                    // The capped product again: what the probability's logarithm says of it.
                    let mut x = p.ln() + tiles.lse[first_row + e];
                    if comptime!(bp.sparse) {
                        x -= key_scores[comptime!(m * 2 + lower)];
                    }
                    let slope = logit_scale.slope(x, bp.softcap);
                    // Whatever is lost to underflow has no gradient.
                    ds *= select(p <= 0.0f32, 1.0f32, slope);
                }
                values.insert(e, ds);
                weights.insert(comptime!(lower * 2 + e), ds);
            }
            put(
                &mut a[m],
                comptime!(half * 2 + lower),
                Vector::cast_from(values),
            );
        }
        if comptime!(boundary) {
            // Read by `add_broken`; a branch would cost more than the store.
            tiles.weights[place] = weights;
        }
    }
}

/// On a broken step, `acc += weights * rows` over the selected pairs alone, row by row: the weights are in
/// shared memory.
#[cube]
pub(super) fn add_broken<E: Float, NC: Size>(
    step: usize,
    at: &Step,
    tiles: &Tiles<E>,
    acc: &mut Accumulators<NC>,
    #[comptime] first_role: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let chunks = comptime!(bp.chunks());
    let lane = UNIT_POS_X as usize;
    let stage = step % STAGES;
    let base = stage * comptime!(bp.rows * bp.chunks());
    let key = UNIT_POS_Y as usize % comptime!(bp.role_warps) * comptime!(bp.warp_keys()) + lane / 4;
    if at.broken {
        sync_plane();
        for row in 0..comptime!(bp.rows) {
            let owner = lane / 4 * 4 + row % 8 / 2;
            let odd = row % 2 == 1;
            let query = query_of::<E>(tiles, row, stage, at, bp);
            #[unroll]
            for m in 0..comptime!(bp.fragments) {
                let weights = tiles.weights[weight_place(step, row / 8, owner, m, bp)];
                #[unroll]
                for lower in 0..2usize {
                    let slot = key + comptime!(m * 16 + lower * 8);
                    if tiles.first[slot] <= query && query < tiles.end[slot] {
                        let even_weight = weights.extract(comptime!(lower * 2));
                        let odd_weight = weights.extract(comptime!(lower * 2 + 1));
                        let weight = select(odd, odd_weight, even_weight);
                        #[unroll]
                        for c in 0..chunks {
                            let place = base + swizzle(row, c, chunks);
                            let pair = if comptime!(first_role) {
                                pick::<E>(tiles.grad_out[place], lane % 4)
                            } else {
                                pick::<E>(tiles.q[place], lane % 4)
                            };
                            add_row::<NC>(acc, pair, weight, comptime!(m * chunks + c), lower);
                        }
                    }
                }
            }
        }
    }
}

/// Sets one register of an A fragment.
#[cube]
pub(super) fn put<E: Float, NA: Size>(
    fragment: &mut Array<Vector<E, NA>>,
    #[comptime] register: usize,
    value: Vector<E, NA>,
) {
    fragment[register] = value;
}
