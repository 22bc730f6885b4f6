//! The two roles of the dk/dv kernel's warps.
//!
//! A warp of the first role owns keys' dV: it computes `P^T` from `S^T = K Q^T`, passes it on through shared memory and
//! accumulates `P^T dO`. Its partner of the second role owns the same keys' dK and the gradient of their scores: it
//! computes `dS^T = P^T (dP^T - delta)` from `dP^T = V dO^T` and accumulates `dS^T Q`. The second role lags by one
//! query tile, so that one role's products overlap the other's exponentials and no warp waits for another inside a
//! tile. A warp's keys are the rows of its products: `P^T` and `dS^T` turn from accumulators into A fragments in
//! registers.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::mma::keys::LaneKeys;
use crate::backward::dkdv::mma::queries::{Tiles, copy_step, step_at};
use crate::backward::dkdv::mma::warp::{WarpStep, WarpSums};
use crate::backward::dkdv::mma::weights::{probabilities, score_gradients};
use crate::backward::dkdv::shared::args::BackwardInputs;
use crate::backward::dkdv::shared::mask::{KeyMask, SeenWords};
use crate::backward::dkdv::shared::queries::{Pairs, QueryRows, Step, StepLses};
use crate::backward::dkdv::shared::steps::{Cursor, StepOrder};
use crate::matrix::mma::{LanePlace, Shape, load_a, multiply};
use crate::matrix::ptx::{commit_copies, shared_address, wait_copies};
use cubecl::prelude::*;

/// The operands of a warp's products, as addresses in shared memory.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Operands {
    /// The warp's keys: K in the first role, V in the second.
    pub keys: u32,
    /// The stages of the other operand of these products: Q or dO.
    pub products: u32,
    /// The stages of the rows that are multiplied by the weights: dO or Q.
    pub sums: u32,
    /// This lane's contribution to the addresses of fragments.
    pub rows: LanePlace,
    pub columns: LanePlace,
    #[cube(comptime)]
    pub first_role: bool,
}

#[cube]
impl Operands {
    pub(crate) fn new<E: Float>(
        tiles: &Tiles<E>,
        #[comptime] first_role: bool,
        #[comptime] bp: DkdvBlueprint,
    ) -> Operands {
        let segments = comptime!(bp.segments());
        let warp = UNIT_POS_Y % comptime!(bp.role_warps as u32);
        let own = warp * comptime!((2 * bp.warp_keys() * bp.head_dim) as u32);
        let q = shared_address(&tiles.q[0..1]);
        let grad_out = shared_address(&tiles.grad_out[0..1]);
        let (rows, columns) = (LanePlace::rows(segments), LanePlace::columns(segments));
        let (keys, products, sums) = if comptime!(first_role) {
            (&tiles.k, q, grad_out)
        } else {
            (&tiles.v, grad_out, q)
        };
        Operands {
            keys: shared_address(&keys[0..1]) + own,
            products,
            sums,
            rows,
            columns,
            first_role,
        }
    }
}

/// The step whose copies start next.
#[derive(CubeType)]
struct NextStep {
    at: Cursor,
    /// The following entry of the list, read one iteration ahead.
    entry: u32,
}

#[cube]
impl NextStep {
    fn first(order: &StepOrder, #[comptime] bp: DkdvBlueprint) -> NextStep {
        let at = order.first(bp);
        let mut entry = 0u32;
        if comptime!(bp.pattern.is_planned()) {
            entry = order.list.entry(1usize);
        }
        NextStep { at, entry }
    }

    fn advance(&mut self, order: &StepOrder, turn: usize, #[comptime] bp: DkdvBlueprint) {
        if comptime!(bp.pattern.is_planned()) {
            let step = Cursor::listed(self.entry, bp);
            self.at.tile = step.tile;
            self.at.head = step.head;
            self.entry = order.list.entry(turn + 2);
        } else {
            self.at.advance(&order.range, bp);
        }
    }
}

/// Streams the queries of a cube's steps, the first of which is in flight together with the keys. The second role adds
/// the gradients of biases that differ between heads to `grad_scores`. Returns true if some row of some boundary step
/// was not finite.
#[cube]
pub(crate) fn stream_queries<E: Float, NS: Size, NO: Size, NA: Size>(
    inputs: &BackwardInputs<E>,
    pairs: &Pairs,
    order: &StepOrder,
    tiles: &mut Tiles<E>,
    keys: &LaneKeys,
    sums: &mut WarpSums<NS, NO>,
    grad_scores: &mut ComptimeOption<Box<[f32]>>,
    #[comptime] first_role: bool,
) -> bool {
    let (rows, bp) = (&pairs.rows, comptime!(pairs.bp));
    let operands = Operands::new::<E>(&*tiles, first_role, bp);
    let mut not_finite = false;
    let mut next = NextStep::first(order, bp);
    // The first query and the head of the previous iteration.
    let mut last_query = 0usize;
    let mut last_head = next.at.head;
    // The head whose biases are loaded for the keys, or whose gradients are summed.
    let mut biased_head = next.at.head;
    if comptime!(bp.pattern.has_head_bias() && (first_role || bp.softcap)) {
        keys.load_biases(&pairs.mask, biased_head);
    }
    for turn in 0..order.count + 1 {
        let query = next.at.tile * comptime!(bp.queries());
        let mut head = 0usize;
        if comptime!(bp.pattern.is_planned() || bp.pattern.has_head_bias() || bp.slopes > 0) {
            // Copied, because the cursor moves on.
            head = next.at.head;
        }
        // The keys' bits are loaded while the products are computed.
        let words = step_words(turn, query, head, order, pairs, first_role);
        // This unit's part of the tile has landed; after the barrier, every unit's has, the first role's probabilities
        // of the tile before are there, and no warp needs the stage that is filled next.
        wait_copies(0u32);
        sync_cube();
        if turn + 1 < order.count {
            next.advance(order, turn, bp);
            copy_step::<E>(inputs, rows, &next.at, turn + 1, tiles, bp);
        }
        commit_copies();
        if comptime!(first_role) {
            if turn < order.count {
                products::<NS, NA>(turn, &operands, &mut sums.products, bp);
                let at = step_at::<E>(turn, query, head, order, &*tiles, bp);
                not_finite = not_finite || at.not_finite;
                let seen = seen_pairs(&words, &at, &pairs.mask, rows.len, keys.count, bp);
                if comptime!(bp.pattern.has_head_bias()) {
                    // Steps are ordered head by head.
                    if head != biased_head {
                        biased_head = head;
                        keys.load_biases(&pairs.mask, head);
                    }
                }
                let step = WarpStep { turn, at, seen };
                accumulate::<E, NS, NO, NA>(
                    inputs, rows, order, &step, &operands, tiles, keys, sums,
                );
            }
        } else {
            if turn > 0 {
                let at = step_at::<E>(turn - 1, last_query, last_head, order, &*tiles, bp);
                not_finite = not_finite || at.not_finite;
                if comptime!(bp.pattern.has_head_bias()) {
                    // The sums belong to one head.
                    if last_head != biased_head {
                        keys.add_bias_gradients(&mut sums.scores, grad_scores, biased_head);
                        keys.load_biases_of_capped(&pairs.mask, last_head);
                        biased_head = last_head;
                    }
                }
                let step = WarpStep::of_second_role(turn - 1, at, bp);
                accumulate::<E, NS, NO, NA>(
                    inputs, rows, order, &step, &operands, tiles, keys, sums,
                );
            }
            if turn < order.count {
                products::<NS, NA>(turn, &operands, &mut sums.products, bp);
            }
        }
        last_query = query;
        last_head = head;
    }
    if comptime!(bp.pattern.has_head_bias() && !first_role) {
        keys.add_bias_gradients(&mut sums.scores, grad_scores, biased_head);
    }
    not_finite
}

/// The mask words of the queries of step `turn`, which begins at query `query` of head `head` of the group; only the
/// first role reads them, if `bp.pattern.is_planned()`.
#[cube]
fn step_words(
    turn: usize,
    query: usize,
    head: usize,
    order: &StepOrder,
    pairs: &Pairs,
    #[comptime] first_role: bool,
) -> SeenWords {
    let bp = comptime!(pairs.bp);
    if comptime!(first_role && bp.pattern.is_planned()) {
        let full = turn < order.list.full;
        SeenWords::read(&pairs.mask, head, query, full, pairs.rows.len, bp)
    } else {
        SeenWords::none()
    }
}

/// The pairs of the step `at` that are visible by its queries' words, see [`WarpStep::seen`].
#[cube]
fn seen_pairs(
    words: &SeenWords,
    at: &Step,
    mask: &KeyMask,
    q_len: usize,
    k_len: usize,
    #[comptime] bp: DkdvBlueprint,
) -> Array<u32> {
    let mut seen = Array::<u32>::new(comptime!(bp.fragments));
    if comptime!(bp.pattern.is_planned()) {
        // Otherwise it is not used.
        if at.boundary {
            #[unroll]
            for m in 0..comptime!(bp.fragments) {
                let further = comptime!(16 * m);
                seen[m] = words.pack(at.query, mask, q_len, k_len, further, bp);
            }
        }
    }
    seen
}

/// `s = K Q^T` in the first role, `V dO^T` in the second.
#[cube]
pub(crate) fn products<NS: Size, NA: Size>(
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

/// Computes the weights of a step from its products, and adds `weights * rows` to the gradients.
#[cube]
fn accumulate<E: Float, NS: Size, NO: Size, NA: Size>(
    inputs: &BackwardInputs<E>,
    rows: &QueryRows,
    order: &StepOrder,
    step: &WarpStep,
    operands: &Operands,
    tiles: &mut Tiles<E>,
    keys: &LaneKeys,
    sums: &mut WarpSums<NS, NO>,
) {
    // Two loop bodies: without a branch inside, the body that nearly all steps take is scheduled as a whole.
    if step.at.boundary {
        let lses = StepLses::of::<E>(inputs, &step.at, step.turn, order, rows, comptime!(keys.bp));
        accumulate_step::<E, NS, NO, NA>(&lses, step, operands, tiles, keys, sums, true);
    } else {
        let lses = StepLses::none::<E>(inputs);
        accumulate_step::<E, NS, NO, NA>(&lses, step, operands, tiles, keys, sums, false);
    }
}

#[cube]
fn accumulate_step<E: Float, NS: Size, NO: Size, NA: Size>(
    lses: &StepLses,
    step: &WarpStep,
    operands: &Operands,
    tiles: &mut Tiles<E>,
    keys: &LaneKeys,
    sums: &mut WarpSums<NS, NO>,
    #[comptime] boundary: bool,
) {
    let (bp, first_role) = comptime!((keys.bp, operands.first_role));
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
            bounds[n * 2] = tiles.bounds.first[key + n * 8];
            bounds[n * 2 + 1] = tiles.bounds.end[key + n * 8];
        }
    }
    let stage =
        operands.sums + (step.turn % comptime!(bp.stages)) as u32 * comptime!(bp.stage_bytes());
    #[unroll]
    for n in 0..comptime!(bp.rows / 16) {
        let mut a = Vector::<u32, NA>::new(0u32);
        #[unroll]
        for half in 0..2usize {
            let column = comptime!(n * 2 + half);
            if comptime!(first_role) {
                let s = &sums.products;
                a = probabilities::<E, NS, NA>(
                    a, lses, step, &bounds, tiles, s, keys, column, boundary,
                );
            } else {
                a = score_gradients::<E, NS, NO, NA>(
                    a, lses, step, &*tiles, sums, keys, column, boundary,
                );
            }
        }
        let rows = stage + comptime!((n * 32 * bp.head_dim) as u32);
        if comptime!(boundary) {
            if step.at.not_finite {
                add_rows::<NO, NA>(&mut sums.gradients, a, rows, operands, cleaned);
            } else {
                add_rows::<NO, NA>(&mut sums.gradients, a, rows, operands, shape);
            }
        } else {
            add_rows::<NO, NA>(&mut sums.gradients, a, rows, operands, shape);
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
