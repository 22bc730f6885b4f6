//! The two roles of the dk/dv kernel's warps.
//!
//! A warp of the first role owns keys' dV: it makes `P^T` of `S^T = K Q^T`, hands it on through shared
//! memory and adds `P^T dO`. Its partner of the second role owns the same keys' dK and the gradient of
//! their scores: it makes `dS^T = P^T (dP^T - delta)` of `dP^T = V dO^T` and adds `dS^T Q`. The second
//! role is one query tile behind, so that one role's products overlap the other's exponentials and no
//! warp waits for another inside a tile. A warp's keys are the rows of its products: `P^T` and `dS^T` turn
//! from accumulators into A fragments in registers.

use super::blueprint::{DkdvBlueprint, STAGES};
use super::operands::{Fragments, load_a, multiply_rows};
use super::queries::{QueryRows, Range, Step, Tiles, copy_queries};
use super::weights::{add_broken, probabilities, score_gradients};
use crate::forward::mma::LogitScale;
use crate::tile::mma::{Accumulators, Chunk, commit_copies, set, wait_copies};
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

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
