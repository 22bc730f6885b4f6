//! The two roles of the dk/dv kernel's warps.
//!
//! A warp of the first role owns keys' dV: it makes `P^T` of `S^T = K Q^T`, passes it on through shared memory and
//! accumulates `P^T dO`. Its partner of the second role owns the same keys' dK and the gradient of their scores: it
//! makes `dS^T = P^T (dP^T - delta)` of `dP^T = V dO^T` and accumulates `dS^T Q`. The second role lags by one query
//! tile, so that one role's products overlap the other's exponentials and no warp waits for another inside a tile. A
//! warp's keys are the rows of its products: `P^T` and `dS^T` turn from accumulators into A fragments in registers.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::mma::output::BiasKeys;
use crate::backward::dkdv::mma::weights::{probabilities, score_gradients};
use crate::backward::dkdv::shared::args::BackwardInputs;
use crate::backward::dkdv::shared::mask::{KeyMask, StepList};
use crate::backward::dkdv::shared::queries::{Cursor, QueryRows, Range, Step, Tiles, copy_step};
use crate::backward::dkdv::shared::seen::SeenWords;
use crate::matrix::logits::LogitScale;
use crate::matrix::mma::product::{LanePlace, Shape, load_a, multiply};
use crate::matrix::ptx::{commit_copies, shared_address, wait_copies};
use cubecl::prelude::*;

/// The operands of a warp's products, as addresses in shared memory.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Operands {
    /// The warp's keys: K in the first role, V in the second.
    pub keys: u32,
    /// The stages of the other operand of these products: Q or dO.
    pub products: u32,
    /// The stages of the rows that the weights multiply: dO or Q.
    pub sums: u32,
    /// This lane's contribution to the addresses of fragments.
    pub rows: LanePlace,
    pub columns: LanePlace,
}

#[cube]
impl Operands {
    pub(crate) fn new<E: Float>(
        tiles: &Tiles<E>,
        #[comptime] first_role: bool,
        #[comptime] bp: DkdvBlueprint,
    ) -> Operands {
        let chunks = comptime!(bp.chunks());
        let warp = UNIT_POS_Y % comptime!(bp.role_warps as u32);
        let own = warp * comptime!((2 * bp.warp_keys() * bp.head_dim) as u32);
        let q = shared_address(&tiles.q[0..1]);
        let grad_out = shared_address(&tiles.grad_out[0..1]);
        let (rows, columns) = (LanePlace::rows(chunks), LanePlace::columns(chunks));
        if comptime!(first_role) {
            Operands {
                keys: shared_address(&tiles.k[0..1]) + own,
                products: q,
                sums: grad_out,
                rows,
                columns,
            }
        } else {
            Operands {
                keys: shared_address(&tiles.v[0..1]) + own,
                products: grad_out,
                sums: q,
                rows,
                columns,
            }
        }
    }
}

/// Streams the queries of `range`, or if `bp.pattern.is_planned()` the queries of `list`, whose first tile is in flight
/// together with the keys. Returns whether some step was broken.
///
/// `s` takes the products with a query tile, `acc` dV in the first role, dK without its scale in the second:
/// accumulators shaped as in [`DkdvBlueprint::products`] and [`DkdvBlueprint::sums`]. `score_sums` takes the second
/// role's dz of the two rows of every fragment, which with `bp.pattern.has_head_bias()` it adds to `grad_scores`.
#[cube]
pub(crate) fn stream_queries<E: Float, NS: Size, NO: Size, NA: Size>(
    inputs: &BackwardInputs<E>,
    rows: &QueryRows,
    range: &Range,
    list: &StepList,
    steps: usize,
    mask: &KeyMask,
    keys: &BiasKeys,
    logit_scale: &LogitScale,
    key_scores: &mut Array<f32>,
    tiles: &mut Tiles<E>,
    s: &mut Array<Vector<f32, NS>>,
    acc: &mut Array<Vector<f32, NO>>,
    score_sums: &mut Array<f32>,
    grad_scores: &mut [f32],
    #[comptime] first_role: bool,
    #[comptime] bp: DkdvBlueprint,
) -> bool {
    let operands = Operands::new::<E>(&*tiles, first_role, bp);
    let mut any_broken = false;
    let mut next = Cursor::first_of(list, range, bp);
    // The entry of the following iteration, read one iteration ahead.
    let mut entry = 0u32;
    if comptime!(bp.pattern.is_planned()) {
        entry = list.entry(1usize);
    }
    // The first query and the head of the previous iteration.
    let mut last_query = 0usize;
    let mut last_head = next.head;
    // The head whose biases are loaded for the keys.
    let mut biased_head = next.head;
    if comptime!(bp.pattern.has_head_bias() && (first_role || bp.softcap)) {
        keys.load(key_scores, mask, biased_head, bp);
    }
    for turn in 0..steps + 1 {
        let query = next.tile * comptime!(bp.queries());
        // Copied, because the cursor moves on.
        let mut head = 0usize;
        if comptime!(bp.pattern.is_planned() || bp.pattern.has_head_bias()) {
            head = next.head;
        }
        // The keys' bits are loaded while the products are computed.
        let words = if comptime!(first_role && bp.pattern.is_planned()) {
            SeenWords::read(mask, head, query, turn < list.whole, rows.len, bp)
        } else {
            SeenWords::none()
        };
        // This unit's part of the tile has landed; after the barrier, every unit's has, the first role's probabilities
        // of the tile before are there, and no warp needs the stage that is filled next.
        wait_copies(0u32);
        sync_cube();
        if turn + 1 < steps {
            if comptime!(bp.pattern.is_planned()) {
                let step = Cursor::listed(entry, bp);
                next.tile = step.tile;
                next.head = step.head;
                entry = list.entry(turn + 2);
            } else {
                next.advance(range, bp);
            }
            copy_step::<E>(inputs, rows, &next, turn + 1, tiles, bp);
        }
        commit_copies();
        if comptime!(first_role) {
            if turn < steps {
                products::<NS, NA>(turn, &operands, s, bp);
                let at = Step::at::<E>(turn, query, list, range, &*tiles, bp);
                any_broken = any_broken || at.broken;
                let mut seen = Array::<u32>::new(comptime!(bp.fragments));
                if comptime!(bp.pattern.is_planned()) {
                    // Otherwise it is not used.
                    if at.boundary {
                        #[unroll]
                        for m in 0..comptime!(bp.fragments) {
                            let further = comptime!(16 * m);
                            seen[m] = words.pack(query, mask, rows.len, keys.count, further, bp);
                        }
                    }
                }
                if comptime!(bp.pattern.has_head_bias()) {
                    // Steps are ordered head by head.
                    if head != biased_head {
                        biased_head = head;
                        keys.load(key_scores, mask, head, bp);
                    }
                }
                accumulate::<E, NS, NO, NA>(
                    turn,
                    &at,
                    &operands,
                    logit_scale,
                    &*key_scores,
                    &seen,
                    tiles,
                    &*s,
                    acc,
                    score_sums,
                    true,
                    bp,
                );
            }
        } else {
            if turn > 0 {
                let at = Step::at::<E>(turn - 1, last_query, list, range, &*tiles, bp);
                any_broken = any_broken || at.broken;
                if comptime!(bp.pattern.has_head_bias()) {
                    // The sums belong to one head.
                    if last_head != biased_head {
                        keys.add(score_sums, grad_scores, biased_head, bp);
                        biased_head = last_head;
                        if comptime!(bp.softcap) {
                            keys.load(key_scores, mask, last_head, bp);
                        }
                    }
                }
                // The first role's weights encode the selection.
                let seen = Array::<u32>::new(comptime!(bp.fragments));
                accumulate::<E, NS, NO, NA>(
                    turn - 1,
                    &at,
                    &operands,
                    logit_scale,
                    &*key_scores,
                    &seen,
                    tiles,
                    &*s,
                    acc,
                    score_sums,
                    false,
                    bp,
                );
            }
            if turn < steps {
                products::<NS, NA>(turn, &operands, s, bp);
            }
        }
        last_query = query;
        last_head = head;
    }
    if comptime!(bp.pattern.has_head_bias() && !first_role) {
        keys.add(score_sums, grad_scores, biased_head, bp);
    }
    any_broken
}

/// `s = K Q^T` in the first role, `V dO^T` in the second.
#[cube]
fn products<NS: Size, NA: Size>(
    step: usize,
    operands: &Operands,
    s: &mut Array<Vector<f32, NS>>,
    #[comptime] bp: DkdvBlueprint,
) {
    let shape = comptime!(bp.products());
    let stage =
        operands.products + (step % comptime!(bp.stages)) as u32 * comptime!(bp.stage_bytes());
    #[unroll]
    for n in 0..comptime!(bp.rows / 16 / shape.blocks) {
        s[n] = Vector::new(0.0f32);
    }
    #[unroll]
    for c in 0..comptime!(bp.head_dim / 16) {
        let shape = comptime!(shape.at(16 * c));
        let a = load_a::<NA>(operands.keys, &operands.rows, shape);
        #[unroll]
        for n in 0..comptime!(bp.rows / 16 / shape.blocks) {
            let rows = stage + comptime!((n * shape.blocks * 32 * bp.head_dim) as u32);
            s[n] = multiply::<NS, NA>(s[n], a, rows, &operands.columns, shape);
        }
    }
}

/// Computes the weights of step `step` from its products `s`, and `acc += weights * rows`.
#[cube]
fn accumulate<E: Float, NS: Size, NO: Size, NA: Size>(
    step: usize,
    at: &Step,
    operands: &Operands,
    logit_scale: &LogitScale,
    key_scores: &Array<f32>,
    seen: &Array<u32>,
    tiles: &mut Tiles<E>,
    s: &Array<Vector<f32, NS>>,
    acc: &mut Array<Vector<f32, NO>>,
    score_sums: &mut Array<f32>,
    #[comptime] first_role: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    // Two loop bodies: without a branch inside, the body that nearly all steps take is scheduled as a whole.
    if at.boundary {
        accumulate_step::<E, NS, NO, NA>(
            step,
            at,
            operands,
            logit_scale,
            key_scores,
            seen,
            tiles,
            s,
            acc,
            score_sums,
            true,
            first_role,
            bp,
        );
    } else {
        accumulate_step::<E, NS, NO, NA>(
            step,
            at,
            operands,
            logit_scale,
            key_scores,
            seen,
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
fn accumulate_step<E: Float, NS: Size, NO: Size, NA: Size>(
    step: usize,
    at: &Step,
    operands: &Operands,
    logit_scale: &LogitScale,
    key_scores: &Array<f32>,
    seen: &Array<u32>,
    tiles: &mut Tiles<E>,
    s: &Array<Vector<f32, NS>>,
    acc: &mut Array<Vector<f32, NO>>,
    score_sums: &mut Array<f32>,
    #[comptime] boundary: bool,
    #[comptime] first_role: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let shape = comptime!(bp.sums());
    let cleaned = comptime!(Shape {
        cleaned: true,
        ..shape
    });
    // First and end of the queries that attend to the keys of this lane.
    let mut bounds = Array::<i32>::new(comptime!(bp.fragments * 4));
    if comptime!(boundary && first_role && !bp.pattern.is_planned()) {
        let key = UNIT_POS_Y as usize % comptime!(bp.role_warps) * comptime!(bp.warp_keys())
            + UNIT_POS_X as usize / 4;
        #[unroll]
        for n in 0..comptime!(bp.fragments * 2) {
            bounds[n * 2] = tiles.first[key + n * 8];
            bounds[n * 2 + 1] = tiles.end[key + n * 8];
        }
    }
    let stage = operands.sums + (step % comptime!(bp.stages)) as u32 * comptime!(bp.stage_bytes());
    #[unroll]
    for n in 0..comptime!(bp.rows / 16) {
        let mut a = Vector::<u32, NA>::new(0u32);
        #[unroll]
        for half in 0..2usize {
            let column = comptime!(n * 2 + half);
            if comptime!(first_role) {
                a = probabilities::<E, NS, NA>(
                    a,
                    step,
                    at,
                    logit_scale,
                    key_scores,
                    tiles,
                    s,
                    &bounds,
                    seen,
                    column,
                    boundary,
                    bp,
                );
            } else {
                a = score_gradients::<E, NS, NA>(
                    a,
                    step,
                    logit_scale,
                    key_scores,
                    &*tiles,
                    s,
                    score_sums,
                    column,
                    boundary,
                    bp,
                );
            }
        }
        let rows = stage + comptime!((n * 32 * bp.head_dim) as u32);
        if comptime!(boundary) {
            if at.broken {
                add_rows::<NO, NA>(acc, a, rows, operands, cleaned);
            } else {
                add_rows::<NO, NA>(acc, a, rows, operands, shape);
            }
        } else {
            add_rows::<NO, NA>(acc, a, rows, operands, shape);
        }
    }
}

/// `acc += a * rows` over the sixteen query rows that begin at address `rows`.
#[cube]
fn add_rows<NO: Size, NA: Size>(
    acc: &mut Array<Vector<f32, NO>>,
    a: Vector<u32, NA>,
    rows: u32,
    operands: &Operands,
    #[comptime] shape: Shape,
) {
    #[unroll]
    for c in 0..comptime!(shape.columns / 32) {
        let shape = comptime!(shape.at(32 * c));
        acc[c] = multiply::<NO, NA>(acc[c], a, rows, &operands.rows, shape);
    }
}
