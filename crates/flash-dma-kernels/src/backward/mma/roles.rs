//! The two roles of the dk/dv kernel's warps.
//!
//! A warp of the first role owns keys' dV: it makes `P^T` of `S^T = K Q^T`, hands it on through shared
//! memory and adds `P^T dO`. Its partner of the second role owns the same keys' dK and the gradient of
//! their scores: it makes `dS^T = P^T (dP^T - delta)` of `dP^T = V dO^T` and adds `dS^T Q`. The second
//! role is one query tile behind, so that one role's products overlap the other's exponentials and no
//! warp waits for another inside a tile. A warp's keys are the rows of its products: `P^T` and `dS^T` turn
//! from accumulators into A fragments in registers.

use super::blueprint::{DkdvBlueprint, STAGES};
use super::finite::{add_row, pick};
use super::operands::{Fragments, load_a, multiply_rows};
use super::queries::{QueryRows, Range, Step, Tiles, copy_queries, query_of};
use crate::forward::mma::{LogitScale, exp_of};
use crate::tile::mma::{Accumulators, Chunk, commit_copies, set, swizzle, wait_copies};
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

/// What a pair's weight says that is not selected.
const NOT_SELECTED: f32 = -1.0;

/// Streams the queries of `range`, whose first tile is under way together with the keys.
///
/// `acc` (`fragments * chunks` accumulators) takes dV in the first role, dK without its scale in the
/// second; `score_sums` takes the second role's dz of the two rows of every fragment.
#[cube]
pub(super) fn stream_queries<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    q: &Tensor<Chunk<E>>,
    grad_out: &Tensor<Chunk<E>>,
    lse: &[f32],
    delta: &[f32],
    rows: &QueryRows,
    range: &Range,
    steps: usize,
    logit_scale: &LogitScale,
    key_scores: &Array<f32>,
    tiles: &mut Tiles<E>,
    s: &mut Accumulators<NC>,
    acc: &mut Accumulators<NC>,
    score_sums: &mut Array<f32>,
    #[comptime] first_role: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    for turn in 0..steps + 1 {
        // This unit's part of the tile has landed; behind the barrier, every unit's has, the first
        // role's probabilities of the tile before are there, and nobody needs the stage that is filled
        // next.
        wait_copies(0u32);
        sync_cube();
        if turn + 1 < steps {
            copy_queries::<E>(q, grad_out, lse, delta, rows, range, turn + 1, tiles, bp);
        }
        commit_copies();
        if comptime!(first_role) {
            if turn < steps {
                products::<E, NA, NB, NC>(def, turn, &*tiles, s, true, bp);
                accumulate::<E, NA, NB, NC>(
                    def,
                    turn,
                    range,
                    logit_scale,
                    key_scores,
                    tiles,
                    s,
                    acc,
                    score_sums,
                    true,
                    bp,
                );
            }
        } else {
            if turn > 0 {
                accumulate::<E, NA, NB, NC>(
                    def,
                    turn - 1,
                    range,
                    logit_scale,
                    key_scores,
                    tiles,
                    s,
                    acc,
                    score_sums,
                    false,
                    bp,
                );
            }
            if turn < steps {
                products::<E, NA, NB, NC>(def, turn, &*tiles, s, false, bp);
            }
        }
    }
}

/// `s = K Q^T` in the first role, `V dO^T` in the second.
#[cube]
fn products<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    step: usize,
    tiles: &Tiles<E>,
    s: &mut Accumulators<NC>,
    #[comptime] first_role: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let (chunks, columns) = comptime!((bp.chunks(), bp.rows / 8));
    let key = UNIT_POS_Y as usize % comptime!(bp.role_warps) * comptime!(bp.warp_keys());
    let base = step % STAGES * comptime!(bp.rows * bp.chunks());
    #[unroll]
    for n in 0..comptime!(bp.fragments * columns) {
        set(&mut s[n], 0usize, Vector::new(0.0f32));
        set(&mut s[n], 1usize, Vector::new(0.0f32));
    }
    #[unroll]
    for c in 0..comptime!(chunks / 2) {
        let mut a = Fragments::<E, NA>::new();
        #[unroll]
        for m in 0..comptime!(bp.fragments) {
            let row = key + comptime!(m * 16);
            if comptime!(first_role) {
                a.push(load_a::<E, NA>(def, &tiles.k, 0usize, row, c, chunks));
            } else {
                a.push(load_a::<E, NA>(def, &tiles.v, 0usize, row, c, chunks));
            }
        }
        #[unroll]
        for n in 0..comptime!(bp.rows / 16) {
            let row = comptime!(n * 16).runtime();
            let n = comptime!(n * 2);
            let fragments = comptime!(bp.fragments);
            if comptime!(first_role) {
                multiply_rows::<E, NA, NB, NC>(
                    def, &a, &tiles.q, base, row, s, fragments, columns, n, c, chunks, false,
                );
            } else {
                multiply_rows::<E, NA, NB, NC>(
                    def,
                    &a,
                    &tiles.grad_out,
                    base,
                    row,
                    s,
                    fragments,
                    columns,
                    n,
                    c,
                    chunks,
                    false,
                );
            }
        }
    }
}

/// The weights of step `step` from its products `s`, and `acc += weights * rows`.
#[cube]
fn accumulate<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    step: usize,
    range: &Range,
    logit_scale: &LogitScale,
    key_scores: &Array<f32>,
    tiles: &mut Tiles<E>,
    s: &mut Accumulators<NC>,
    acc: &mut Accumulators<NC>,
    score_sums: &mut Array<f32>,
    #[comptime] first_role: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let at = Step::new::<E>(step, range, &*tiles, bp);
    // Two bodies: without a branch inside, the one that nearly all steps take is scheduled as a whole.
    if at.boundary {
        accumulate_step::<E, NA, NB, NC>(
            def,
            &at,
            step,
            logit_scale,
            key_scores,
            tiles,
            s,
            acc,
            score_sums,
            true,
            first_role,
            bp,
        );
    } else {
        accumulate_step::<E, NA, NB, NC>(
            def,
            &at,
            step,
            logit_scale,
            key_scores,
            tiles,
            s,
            acc,
            score_sums,
            false,
            first_role,
            bp,
        );
    }
}

#[cube]
fn accumulate_step<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    at: &Step,
    step: usize,
    logit_scale: &LogitScale,
    key_scores: &Array<f32>,
    tiles: &mut Tiles<E>,
    s: &mut Accumulators<NC>,
    acc: &mut Accumulators<NC>,
    score_sums: &mut Array<f32>,
    #[comptime] boundary: bool,
    #[comptime] first_role: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let fragments = comptime!(bp.fragments);
    // First and end of the queries that attend to the keys of this lane.
    let mut bounds = Array::<i32>::new(comptime!(bp.fragments * 4));
    if comptime!(boundary && first_role) {
        let key = UNIT_POS_Y as usize % comptime!(bp.role_warps) * comptime!(bp.warp_keys())
            + UNIT_POS_X as usize / 4;
        #[unroll]
        for n in 0..comptime!(bp.fragments * 2) {
            bounds[n * 2] = tiles.first[key + n * 8];
            bounds[n * 2 + 1] = tiles.end[key + n * 8];
        }
    }
    #[unroll]
    for n in 0..comptime!(bp.rows / 16) {
        let mut a = Fragments::<E, NA>::new();
        #[unroll]
        for _ in 0..fragments {
            a.push(Array::<Vector<E, NA>>::new(4usize));
        }
        #[unroll]
        for half in 0..2usize {
            let column = comptime!(n * 2 + half);
            if comptime!(first_role) {
                probabilities::<E, NA, NC>(
                    step,
                    at,
                    logit_scale,
                    key_scores,
                    tiles,
                    &*s,
                    &mut a,
                    &bounds,
                    column,
                    half,
                    boundary,
                    bp,
                );
            } else {
                score_gradients::<E, NA, NC>(
                    step,
                    logit_scale,
                    key_scores,
                    tiles,
                    &*s,
                    &mut a,
                    score_sums,
                    column,
                    half,
                    boundary,
                    bp,
                );
            }
        }
        if comptime!(boundary) {
            if !at.broken {
                multiply_weights::<E, NA, NB, NC>(def, &a, step, &*tiles, acc, n, first_role, bp);
            }
        } else {
            multiply_weights::<E, NA, NB, NC>(def, &a, step, &*tiles, acc, n, first_role, bp);
        }
    }
    if comptime!(boundary) {
        add_broken::<E, NC>(step, at, &*tiles, acc, first_role, bp);
    }
}

/// `acc += a * rows` for the sixteen query rows `16 n ..`.
#[cube]
fn multiply_weights<E: Float, NA: Size, NB: Size, NC: Size>(
    def: &MmaDefinition<E, E, f32>,
    a: &Fragments<E, NA>,
    step: usize,
    tiles: &Tiles<E>,
    acc: &mut Accumulators<NC>,
    #[comptime] n: usize,
    #[comptime] first_role: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let (chunks, fragments) = comptime!((bp.chunks(), bp.fragments));
    let base = step % STAGES * comptime!(bp.rows * bp.chunks());
    let row = comptime!(n * 16).runtime();
    #[unroll]
    for c in 0..comptime!(chunks / 2) {
        let column = comptime!(c * 2);
        if comptime!(first_role) {
            multiply_rows::<E, NA, NB, NC>(
                def,
                a,
                &tiles.grad_out,
                base,
                row,
                acc,
                fragments,
                chunks,
                column,
                c,
                chunks,
                true,
            );
        } else {
            multiply_rows::<E, NA, NB, NC>(
                def, a, &tiles.q, base, row, acc, fragments, chunks, column, c, chunks, true,
            );
        }
    }
}

/// Where this lane's weights of accumulator `n` of fragment `m` are, for step `step`.
#[cube]
fn weight_place(
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
fn probabilities<E: Float, NA: Size, NC: Size>(
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
fn score_gradients<E: Float, NA: Size, NC: Size>(
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
fn add_broken<E: Float, NC: Size>(
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
fn put<E: Float, NA: Size>(
    fragment: &mut Array<Vector<E, NA>>,
    #[comptime] register: usize,
    value: Vector<E, NA>,
) {
    fragment[register] = value;
}
