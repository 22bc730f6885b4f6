//! The gradient of a bias per pair on Hopper's tensor cores.

use crate::args::Scaling;
use crate::backward::bias::blueprint::BiasBlueprint;
use crate::backward::bias::steps::{BiasStep, BiasSteps, PlanTensors, Sizes};
use crate::backward::bias::tiles::{BiasBoxes, BiasCopies, BiasTiles, row_stage};
use crate::backward::dq::rows::{ExactRows, LaneRow};
use crate::backward::products::{Products, ProductsExpand};
use crate::matrix::logit_scale::{ExactLse, LogitScale, is_large_scaled};
use crate::matrix::mask::{SeenPair, is_set};
use crate::matrix::pair_bias::PairBias;
use crate::matrix::ptx::any_lane;
use crate::matrix::rows::TileRow;
use crate::matrix::wgmma::panel::Panels;
use crate::matrix::wgmma::product::{finish, finish_but, start_nt};
use crate::matrix::wgmma::ring::Turns;
use crate::pattern::position::last_key;
use cubecl::prelude::*;

/// The LSEs of all rows and their rounding errors, each contiguous `[batch, q_heads, q_len]`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SavedLses {
    pub lse: Box<[f32]>,
    pub lse_rest: Box<[f32]>,
}

/// Sizes of a launch of [`bias_wgmma_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct BiasSizes {
    pub q_len: u32,
    pub k_len: u32,
    pub group: u32,
    pub bias_heads: u32,
    pub heads_each: u32,
    pub steps_each: u32,
    pub mask_heads_each: u32,
    pub mask_batch: u32,
    pub bit_blocks: u32,
    pub bit_queries: u32,
    pub run: u32,
}

/// A cube owns a tile of 128 queries of a row (a head of a sequence) of the bias, and a run of consecutive key tiles of
/// 128 keys: `[run, query tile from the last on, row]` is the cube's position. For each key tile it recomputes dS of
/// all heads of all sequences that read the row, in order, and accumulates it in f32 in registers, 64 queries per
/// warpgroup; then it writes the tile, zeros where no pair is seen. Query tiles and keys stream through shared memory
/// where they change from one step to the next, as boxes copied by one unit.
///
/// `bias` `[batch | 1, heads, q_len, k_len]`, any strides; `grad_bias` its shape, contiguous, overwritten. The bits of
/// the `plan` have `bit_blocks` key blocks and `bit_queries` queries. The boxes: of `q` and its gradients
/// `[1, 1, 64, 64]`, of `k` and `v` likewise, of the rows 128 pairs of `-log2(e) lse` and the row sum.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn bias_wgmma_kernel<E: Float>(
    bias: &Tensor<f32>,
    plan: &ComptimeOption<PlanTensors>,
    lses: &SavedLses,
    grad_bias: &mut [f32],
    scaling: &Scaling,
    boxes: &BiasBoxes<E>,
    launched: &BiasSizes,
    #[comptime] bp: BiasBlueprint,
    #[define(E)] _element: ElemType,
) {
    let size!(N) = comptime!(BiasBlueprint::HALF / 2);
    let (keys, half) = comptime!((BiasBlueprint::KEYS, BiasBlueprint::HALF));
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let first_unit = UNIT_POS == 0;
    let sizes = Sizes {
        q_len: launched.q_len as usize,
        k_len: launched.k_len as usize,
        group: launched.group as usize,
        bias_heads: launched.bias_heads as usize,
        heads_each: launched.heads_each as usize,
        steps_each: launched.steps_each as usize,
        mask_heads_each: launched.mask_heads_each as usize,
        mask_batch: launched.mask_batch as usize,
        bit_blocks: launched.bit_blocks as usize,
        bit_queries: launched.bit_queries as usize,
    };
    let steps = BiasSteps::new(sizes, launched.run as usize, bp);
    let tiles = BiasTiles::<E>::new(bp);
    let copies = BiasCopies::new::<E>(&tiles, boxes);
    let turns = Turns::new();
    let scale = LogitScale::new(scaling, comptime!(bp.logit_form()));
    let bias_row = CUBE_POS_Z as usize;
    let pairs = PairBias::row(
        bias,
        bias_row / steps.sizes.bias_heads,
        bias_row % steps.sizes.bias_heads,
    );

    let own_row = warp * 16 + lane / 4;
    let rows = TileRows {
        upper: tile_row(steps.first_query + own_row, &steps.sizes, bp),
        lower: tile_row(steps.first_query + own_row + 8, &steps.sizes, bp),
    };

    let mut now = steps.find(plan, 0usize);
    if first_unit && now.at < steps.total {
        let step = steps.step(&now);
        let key = step.key_tile * keys;
        copies.fill_rows(0usize, step.batch, step.head, steps.first_query, bp);
        copies.fill_keys(0usize, step.batch, step.kv_head, key, bp);
        copies.fill_keys(1usize, step.batch, step.kv_head, key + half, bp);
    }
    // Number of query tiles, key tiles and half key tiles processed so far.
    let mut row_turn = 0usize;
    let mut key_turn = 0usize;
    let mut turn = 0usize;
    for key_tile in steps.first..steps.end {
        let first_key = key_tile * keys;
        let mut sum0 = Vector::<f32, N>::new(0.0f32);
        let mut sum1 = Vector::<f32, N>::new(0.0f32);
        if steps.key_tile(now.at) == key_tile {
            // These are the same for all steps of the tile.
            let (upper, lower) = (&rows.upper, &rows.lower);
            let (q_len, k_len) = (steps.sizes.q_len, steps.sizes.k_len);
            let z0 = pairs.tile::<N>(bias, upper, lower, first_key, q_len, k_len, half);
            let second = first_key + half;
            let z1 = pairs.tile::<N>(bias, upper, lower, second, q_len, k_len, half);
            while steps.key_tile(now.at) == key_tile {
                let step = steps.step(&now);
                copies.wait_rows(row_turn);
                let at = row_stage(row_turn) * comptime!(BiasBlueprint::QUERIES) + own_row;
                let lanes = StepRows {
                    step,
                    upper: lane_row(tiles.rows[at]),
                    lower: lane_row(tiles.rows[at + 8]),
                };
                let step = &lanes.step;
                let q = copies.queries(row_turn, bp);
                let o = copies.grad_out(row_turn, bp);

                // The first half of the keys.
                copies.wait_keys(2 * key_turn);
                turns.wait(turn, 2usize);
                let products = Products::<N>::start(&copies, &q, &o, 2 * key_turn, bp);
                turns.pass(turn, turn + 2, 2usize);

                // The next copies, in flight while the tensor cores multiply.
                let coming = steps.find(plan, now.at + 1);
                let next = steps.step(&coming);
                let more = coming.at < steps.total;
                let new_rows = more && (next.head != step.head || next.batch != step.batch);
                let new_keys = more
                    && (next.kv_head != step.kv_head
                        || next.batch != step.batch
                        || next.key_tile != step.key_tile);
                let next_key = next.key_tile * keys;
                if first_unit && new_rows {
                    copies.fill_rows(row_turn + 1, next.batch, next.head, steps.first_query, bp);
                }
                if first_unit && new_keys {
                    copies.fill_keys(2 * key_turn + 2, next.batch, next.kv_head, next_key, bp);
                }
                let keys0 = HalfTile::<N> {
                    first: first_key,
                    z: z0,
                    products: products.s_finished(),
                };
                sum0 = add_half::<N>(sum0, &keys0, plan, lses, &steps, &rows, &lanes, &scale);
                if new_keys {
                    copies.leave_keys(2 * key_turn);
                }

                // The second half.
                copies.wait_keys(2 * key_turn + 1);
                turns.wait(turn + 1, 2usize);
                let products = Products::<N>::start(&copies, &q, &o, 2 * key_turn + 1, bp);
                turns.pass(turn + 1, select(more, turn + 3, turn + 2), 2usize);
                if first_unit && new_keys {
                    let key = next_key + half;
                    copies.fill_keys(2 * key_turn + 3, next.batch, next.kv_head, key, bp);
                }
                let keys1 = HalfTile::<N> {
                    first: first_key + half,
                    z: z1,
                    products: products.s_finished(),
                };
                sum1 = add_half::<N>(sum1, &keys1, plan, lses, &steps, &rows, &lanes, &scale);
                if new_keys {
                    copies.leave_keys(2 * key_turn + 1);
                    key_turn += 1;
                }
                if new_rows {
                    copies.leave_rows(row_turn);
                    row_turn += 1;
                }
                turn += 2;
                now.at = coming.at;
                now.full = coming.full;
            }
        }
        write_half::<N>(grad_bias, sum0, bias_row, &rows, first_key, &steps.sizes);
        let second = first_key + half;
        write_half::<N>(grad_bias, sum1, bias_row, &rows, second, &steps.sizes);
    }
}

#[cube]
fn tile_row(query: usize, sizes: &Sizes, #[comptime] bp: BiasBlueprint) -> TileRow {
    TileRow {
        valid: query < sizes.q_len,
        query,
        head: 0usize,
        position: last_key(query, sizes.q_len, sizes.k_len, bp.causal),
    }
}

#[cube]
fn lane_row(words: Vector<f32, Const<2>>) -> LaneRow {
    LaneRow {
        reference: words.extract(0usize),
        delta: words.extract(1usize),
    }
}

#[derive(CubeType, Clone, Copy)]
struct TileRows {
    upper: TileRow,
    lower: TileRow,
}

/// The LSEs and row sums of these two rows for the head of a step.
#[derive(CubeType, Clone, Copy)]
struct StepRows {
    step: BiasStep,
    upper: LaneRow,
    lower: LaneRow,
}

#[cube]
impl<N: Size> Products<N> {
    /// Starts the products of the `turn`-th half of a key tile with queries `q` and output gradients `o`: S, then dP.
    fn start(
        copies: &BiasCopies,
        q: &Panels,
        o: &Panels,
        turn: usize,
        #[comptime] bp: BiasBlueprint,
    ) -> Products<N> {
        let (element, head_dim) = comptime!((bp.element, bp.head_dim));
        let k = copies.keys(turn, bp);
        let s = start_nt::<N>(q, &k, element, comptime!(BiasBlueprint::HALF), head_dim);
        let v = copies.values(turn, bp);
        let dp = start_nt::<N>(o, &v, element, comptime!(BiasBlueprint::HALF), head_dim);
        Products::<N> { s, dp }
    }

    /// Waits for S; dP stays in flight.
    fn s_finished(&self) -> Products<N> {
        Products::<N> {
            s: finish_but::<N>(self.s, 1usize, comptime!(BiasBlueprint::HALF / 2)),
            dp: self.dp,
        }
    }
}

/// 64 keys of a key tile: S, and dP, which is still in flight.
#[derive(CubeType, Clone, Copy)]
struct HalfTile<N: Size> {
    /// The first of them.
    first: usize,
    /// Their biases.
    z: Vector<f32, N>,
    products: Products<N>,
}

/// Returns `sum` plus dS of 64 keys; adds zero where a row does not see a key.
#[cube]
fn add_half<N: Size>(
    sum: Vector<f32, N>,
    keys: &HalfTile<N>,
    plan: &ComptimeOption<PlanTensors>,
    lses: &SavedLses,
    steps: &BiasSteps,
    rows: &TileRows,
    lanes: &StepRows,
    logit_scale: &LogitScale,
) -> Vector<f32, N> {
    let (step, products) = (&lanes.step, &keys.products);
    // A row without any logit above -inf has no gradient, whatever its logits are.
    let infinite = f32::new(f32::INFINITY);
    let (empty0, empty1) = (
        lanes.upper.reference == infinite,
        lanes.lower.reference == infinite,
    );
    // A row with a large LSE is a boundary, too, for another reason.
    let mut boundary = !step.full
        || any_lane(
            lanes.upper.reference.abs() == infinite || lanes.lower.reference.abs() == infinite,
        );
    if comptime!(steps.bp.causal && !steps.bp.pattern.is_planned()) {
        let last = (keys.first + comptime!(BiasBlueprint::HALF - 1)) as i32;
        boundary = boundary || any_lane(last > rows.upper.position);
    }
    let none = ExactRows::none();
    // Separate code for each kind: a branch per element would keep the other instructions from overlapping.
    if boundary {
        let block = keys.first / comptime!(BiasBlueprint::HALF);
        let nothing = Vector::<u32, Const<2>>::new(0u32);
        let mut upper = nothing;
        let mut lower = nothing;
        if !empty0 {
            upper = steps.seen(plan, step, &rows.upper, block);
        }
        if !empty1 {
            lower = steps.seen(plan, step, &rows.lower, block);
        }
        let seen = SeenPair { upper, lower };
        let large = any_lane(
            is_large_scaled(lanes.upper.reference) || is_large_scaled(lanes.lower.reference),
        );
        if large {
            let exact = lses.rows(steps, step, rows);
            let p = probabilities::<N>(&products.s, &keys.z, lanes, &exact, logit_scale, true);
            sums::<N>(&sum, products, &p, &seen, lanes, true)
        } else {
            let p = probabilities::<N>(&products.s, &keys.z, lanes, &none, logit_scale, false);
            sums::<N>(&sum, products, &p, &seen, lanes, true)
        }
    } else {
        let all = Vector::<u32, Const<2>>::new(0u32);
        let seen = SeenPair {
            upper: all,
            lower: all,
        };
        let p = probabilities::<N>(&products.s, &keys.z, lanes, &none, logit_scale, false);
        sums::<N>(&sum, products, &p, &seen, lanes, false)
    }
}

/// See [`add_half`]; `seen` is read if `boundary`.
#[cube]
fn sums<N: Size>(
    sum: &Vector<f32, N>,
    products: &Products<N>,
    p: &Vector<f32, N>,
    seen: &SeenPair,
    lanes: &StepRows,
    #[comptime] boundary: bool,
) -> Vector<f32, N> {
    let (upper, lower) = (&lanes.upper, &lanes.lower);
    let dp = finish::<N>(products.dp, comptime!(BiasBlueprint::HALF / 2));
    let mut to = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(BiasBlueprint::HALF / 8) {
        #[unroll]
        for e in 0..2usize {
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let (from0, from1) = (sum.extract(at0), sum.extract(at1));
            let mut sum0 = fma(p.extract(at0), dp.extract(at0) - upper.delta, from0);
            let mut sum1 = fma(p.extract(at1), dp.extract(at1) - lower.delta, from1);
            if comptime!(boundary) {
                sum0 = select(is_set(seen.upper, comptime!(n * 8 + e)), sum0, from0);
                sum1 = select(is_set(seen.lower, comptime!(n * 8 + e)), sum1, from1);
            }
            to.insert(at0, sum0);
            to.insert(at1, sum1);
        }
    }
    to
}

#[cube]
impl SavedLses {
    /// The LSEs of a lane's two rows. A row without a query gets those of another.
    fn rows(&self, steps: &BiasSteps, step: &BiasStep, rows: &TileRows) -> ExactRows {
        let sizes = &steps.sizes;
        let of_head = (step.batch * sizes.bias_heads * sizes.heads_each + step.head) * sizes.q_len;
        let last = sizes.q_len - 1;
        let upper = of_head + min(rows.upper.query, last);
        let lower = of_head + min(rows.lower.query, last);
        ExactRows {
            upper: ExactLse::read(&self.lse, &self.lse_rest, upper),
            lower: ExactLse::read(&self.lse, &self.lse_rest, lower),
        }
    }
}

/// P of the products `s` with biases `z`; if `is_exact`, by the LSEs `exact`, which may be large.
#[cube]
fn probabilities<N: Size>(
    s: &Vector<f32, N>,
    z: &Vector<f32, N>,
    lanes: &StepRows,
    exact: &ExactRows,
    logit_scale: &LogitScale,
    #[comptime] is_exact: bool,
) -> Vector<f32, N> {
    let mut p = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(BiasBlueprint::HALF / 8) {
        #[unroll]
        for e in 0..2usize {
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let (z0, z1) = (z.extract(at0), z.extract(at1));
            let (x0, x1) = (s.extract(at0), s.extract(at1));
            if comptime!(is_exact) {
                let logit0 = logit_scale.apply(x0, z0);
                let logit1 = logit_scale.apply(x1, z1);
                p.insert(at0, exact.upper.probability(logit0));
                p.insert(at1, exact.lower.probability(logit1));
            } else {
                let (upper, lower) = (lanes.upper.reference, lanes.lower.reference);
                p.insert(at0, logit_scale.weight(x0, z0, upper));
                p.insert(at1, logit_scale.weight(x1, z1, lower));
            }
        }
    }
    p
}

/// Writes this lane's part of the gradients of 64 keys from `first` on, of row `bias_row` of the bias.
#[cube]
fn write_half<N: Size>(
    grad: &mut [f32],
    sum: Vector<f32, N>,
    bias_row: usize,
    rows: &TileRows,
    first: usize,
    sizes: &Sizes,
) {
    let own = first + UNIT_POS_X as usize % 4 * 2;
    let at0 = (bias_row * sizes.q_len + rows.upper.query) * sizes.k_len + own;
    let at1 = at0 + 8 * sizes.k_len;
    #[unroll]
    for n in 0..comptime!(BiasBlueprint::HALF / 8) {
        #[unroll]
        for e in 0..2usize {
            let behind = comptime!(n * 8 + e);
            if own + behind < sizes.k_len {
                if rows.upper.valid {
                    grad[at0 + behind] = sum.extract(comptime!(n * 4 + e));
                }
                if rows.lower.valid {
                    grad[at1 + behind] = sum.extract(comptime!(n * 4 + 2 + e));
                }
            }
        }
    }
}
