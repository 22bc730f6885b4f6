//! The gradient of a bias of pairs on Hopper's tensor cores.

use crate::args::Scaling;
use crate::backward::bias::blueprint::BiasBlueprint;
use crate::backward::bias::steps::{BiasStep, BiasSteps, Sizes};
use crate::backward::bias::tiles::{BiasCopies, BiasTiles, row_stage};
use crate::backward::dq::rows::LaneRow;
use crate::matrix::logits::LogitScale;
use crate::matrix::mask::is_set;
use crate::matrix::pair_bias::PairBias;
use crate::matrix::ptx::any_lane;
use crate::matrix::query_tile::TileRow;
use crate::matrix::wgmma::product::{finish, finish_but, start_nt};
use crate::matrix::wgmma::ring::Turns;
use cubecl::prelude::*;

/// The boxes in which tiles are copied.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BiasBoxes<E: Float> {
    pub q_boxes: TensorMap<E, Tiled>,
    pub o_boxes: TensorMap<E, Tiled>,
    pub k_boxes: TensorMap<E, Tiled>,
    pub v_boxes: TensorMap<E, Tiled>,
    pub row_boxes: TensorMap<f32, Tiled>,
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
/// `bias` `[batch | 1, heads, q_len, k_len]`, any strides; `grad_bias` its shape, contiguous, overwritten. `bits`, with
/// `bit_blocks` key blocks and `bit_queries` queries, and `counts` belong to the plan and are read if
/// `bp.pattern.is_planned()`. The boxes: of `q` and its gradients `[1, 1, 64, 64]`, of `k` and `v` likewise, of the
/// rows 128 pairs of `-log2(e) lse` and the row sum.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn bias_wgmma_kernel<E: Float>(
    bias: &Tensor<f32>,
    bits: &[Vector<u32, Const<2>>],
    counts: &[u32],
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
    let copies = BiasCopies::new::<E>(
        &tiles,
        &boxes.q_boxes,
        &boxes.o_boxes,
        &boxes.row_boxes,
        &boxes.k_boxes,
        &boxes.v_boxes,
    );
    let turns = Turns::new();
    let logit_scale = LogitScale::new(scaling, bp.softcap);
    let bias_row = CUBE_POS_Z as usize;
    let pairs = PairBias::row(
        bias,
        bias_row / steps.sizes.bias_heads,
        bias_row % steps.sizes.bias_heads,
    );

    let slot0 = warp * 16 + lane / 4;
    let row0 = tile_row(steps.first_query + slot0, &steps.sizes, bp);
    let row1 = tile_row(steps.first_query + slot0 + 8, &steps.sizes, bp);

    let found = steps.find(counts, 0usize, bp);
    let mut now = found.at;
    let mut whole = found.whole;
    if first_unit && now < steps.total {
        let step = steps.step(now);
        let key = step.key_tile * keys;
        copies.fill_rows(0usize, step.batch, step.head, steps.first_query, bp);
        copies.fill_keys(0usize, step.batch, step.kv_head, key, bp);
        copies.fill_keys(1usize, step.batch, step.kv_head, key + half, bp);
    }
    // The number of query tiles, key tiles and half key tiles processed so far.
    let mut row_turn = 0usize;
    let mut key_turn = 0usize;
    let mut turn = 0usize;
    for key_tile in steps.first..steps.end {
        let first_key = key_tile * keys;
        let mut sum0 = Vector::<f32, N>::new(0.0f32);
        let mut sum1 = Vector::<f32, N>::new(0.0f32);
        if steps.key_tile(now) == key_tile {
            // The same for all steps of the tile.
            let z0 = pairs.tile::<N>(
                bias,
                &row0,
                &row1,
                first_key,
                steps.sizes.q_len,
                steps.sizes.k_len,
                half,
            );
            let z1 = pairs.tile::<N>(
                bias,
                &row0,
                &row1,
                first_key + half,
                steps.sizes.q_len,
                steps.sizes.k_len,
                half,
            );
            while steps.key_tile(now) == key_tile {
                let step = steps.step(now);
                copies.wait_rows(row_turn);
                let at = row_stage(row_turn) * comptime!(BiasBlueprint::QUERIES) + slot0;
                let upper = lane_row(tiles.rows[at]);
                let lower = lane_row(tiles.rows[at + 8]);
                let q = copies.queries(row_turn, bp);
                let o = copies.grad_out(row_turn, bp);

                // The first half of the keys: S = Q K^T, followed by dP = dO V^T.
                copies.wait_keys(2 * key_turn);
                turns.wait(turn, 2usize);
                let k = copies.keys(2 * key_turn, bp);
                let s = start_nt::<N>(&q, &k, comptime!(bp.element), half, comptime!(bp.head_dim));
                let v = copies.values(2 * key_turn, bp);
                let dp = start_nt::<N>(&o, &v, comptime!(bp.element), half, comptime!(bp.head_dim));
                turns.pass(turn, turn + 2, 2usize);

                // The next copies, in flight while the tensor cores multiply.
                let coming = steps.find(counts, now + 1, bp);
                let next = steps.step(coming.at);
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
                let s = finish_but::<N>(s, 1usize, comptime!(BiasBlueprint::HALF / 2));
                sum0 = add_half::<N>(
                    sum0,
                    s,
                    dp,
                    z0,
                    bits,
                    &steps,
                    &step,
                    first_key,
                    whole,
                    &row0,
                    &row1,
                    &upper,
                    &lower,
                    &logit_scale,
                    bp,
                );
                if new_keys {
                    copies.leave_keys(2 * key_turn);
                }

                // The second half.
                copies.wait_keys(2 * key_turn + 1);
                turns.wait(turn + 1, 2usize);
                let k = copies.keys(2 * key_turn + 1, bp);
                let s = start_nt::<N>(&q, &k, comptime!(bp.element), half, comptime!(bp.head_dim));
                let v = copies.values(2 * key_turn + 1, bp);
                let dp = start_nt::<N>(&o, &v, comptime!(bp.element), half, comptime!(bp.head_dim));
                turns.pass(turn + 1, select(more, turn + 3, turn + 2), 2usize);
                if first_unit && new_keys {
                    let key = next_key + half;
                    copies.fill_keys(2 * key_turn + 3, next.batch, next.kv_head, key, bp);
                }
                let s = finish_but::<N>(s, 1usize, comptime!(BiasBlueprint::HALF / 2));
                sum1 = add_half::<N>(
                    sum1,
                    s,
                    dp,
                    z1,
                    bits,
                    &steps,
                    &step,
                    first_key + half,
                    whole,
                    &row0,
                    &row1,
                    &upper,
                    &lower,
                    &logit_scale,
                    bp,
                );
                if new_keys {
                    copies.leave_keys(2 * key_turn + 1);
                    key_turn += 1;
                }
                if new_rows {
                    copies.leave_rows(row_turn);
                    row_turn += 1;
                }
                turn += 2;
                now = coming.at;
                whole = coming.whole;
            }
        }
        write_half::<N>(
            grad_bias,
            sum0,
            bias_row,
            &row0,
            &row1,
            first_key,
            &steps.sizes,
        );
        write_half::<N>(
            grad_bias,
            sum1,
            bias_row,
            &row0,
            &row1,
            first_key + half,
            &steps.sizes,
        );
    }
}

/// The row of query `query`.
#[cube]
fn tile_row(query: usize, sizes: &Sizes, #[comptime] bp: BiasBlueprint) -> TileRow {
    let mut position = sizes.k_len as i32 - 1;
    if comptime!(bp.causal) {
        position += query as i32 + 1 - sizes.q_len as i32;
    }
    TileRow {
        valid: query < sizes.q_len,
        query,
        head: 0usize,
        position,
    }
}

#[cube]
fn lane_row(words: Vector<f32, Const<2>>) -> LaneRow {
    LaneRow {
        reference: words.extract(0usize),
        delta: words.extract(1usize),
    }
}

/// `sum` and dS of 64 keys from `first` on, of S and of dP, which is in flight; zero is added where a row does not see
/// a key. `whole` is the mask's flag for the step.
#[cube]
fn add_half<N: Size>(
    sum: Vector<f32, N>,
    s: Vector<f32, N>,
    dp: Vector<f32, N>,
    z: Vector<f32, N>,
    bits: &[Vector<u32, Const<2>>],
    steps: &BiasSteps,
    step: &BiasStep,
    first: usize,
    whole: bool,
    row0: &TileRow,
    row1: &TileRow,
    upper: &LaneRow,
    lower: &LaneRow,
    logit_scale: &LogitScale,
    #[comptime] bp: BiasBlueprint,
) -> Vector<f32, N> {
    // A row without any logit above -inf has no gradient, whatever its logits are.
    let none = f32::new(f32::INFINITY);
    let (empty0, empty1) = (upper.reference == none, lower.reference == none);
    let mut boundary = !whole || any_lane(empty0 || empty1);
    if comptime!(bp.causal && !bp.pattern.is_planned()) {
        let last = (first + comptime!(BiasBlueprint::HALF - 1)) as i32;
        boundary = boundary || any_lane(last > row0.position);
    }
    // Separate code for boundary tiles: a branch per element would prevent the other instructions from overlapping.
    if boundary {
        let block = first / comptime!(BiasBlueprint::HALF);
        let nothing = Vector::<u32, Const<2>>::new(0u32);
        let mut seen0 = nothing;
        let mut seen1 = nothing;
        if !empty0 {
            seen0 = steps.seen(bits, step, row0, block, bp);
        }
        if !empty1 {
            seen1 = steps.seen(bits, step, row1, block, bp);
        }
        sums::<N>(
            &sum,
            &s,
            dp,
            &z,
            seen0,
            seen1,
            upper,
            lower,
            logit_scale,
            true,
            bp,
        )
    } else {
        let all = Vector::<u32, Const<2>>::new(0u32);
        sums::<N>(
            &sum,
            &s,
            dp,
            &z,
            all,
            all,
            upper,
            lower,
            logit_scale,
            false,
            bp,
        )
    }
}

/// See [`add_half`]; `seen0` and `seen1` are the words of the two rows, read if `boundary`.
#[cube]
fn sums<N: Size>(
    sum: &Vector<f32, N>,
    s: &Vector<f32, N>,
    dp: Vector<f32, N>,
    z: &Vector<f32, N>,
    seen0: Vector<u32, Const<2>>,
    seen1: Vector<u32, Const<2>>,
    upper: &LaneRow,
    lower: &LaneRow,
    logit_scale: &LogitScale,
    #[comptime] boundary: bool,
    #[comptime] bp: BiasBlueprint,
) -> Vector<f32, N> {
    let mut p = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(BiasBlueprint::HALF / 8) {
        #[unroll]
        for e in 0..2usize {
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let (z0, z1) = (z.extract(at0), z.extract(at1));
            let (x0, x1) = (s.extract(at0), s.extract(at1));
            p.insert(
                at0,
                logit_scale.weight(x0, z0, upper.reference, bp.softcap, true),
            );
            p.insert(
                at1,
                logit_scale.weight(x1, z1, lower.reference, bp.softcap, true),
            );
        }
    }
    let dp = finish::<N>(dp, comptime!(BiasBlueprint::HALF / 2));
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
                sum0 = select(is_set(seen0, comptime!(n * 8 + e)), sum0, from0);
                sum1 = select(is_set(seen1, comptime!(n * 8 + e)), sum1, from1);
            }
            to.insert(at0, sum0);
            to.insert(at1, sum1);
        }
    }
    to
}

/// Writes this lane's part of the gradients of 64 keys from `first` on, of row `bias_row` of the bias.
#[cube]
fn write_half<N: Size>(
    grad: &mut [f32],
    sum: Vector<f32, N>,
    bias_row: usize,
    row0: &TileRow,
    row1: &TileRow,
    first: usize,
    sizes: &Sizes,
) {
    let own = first + UNIT_POS_X as usize % 4 * 2;
    let at0 = (bias_row * sizes.q_len + row0.query) * sizes.k_len + own;
    let at1 = at0 + 8 * sizes.k_len;
    #[unroll]
    for n in 0..comptime!(BiasBlueprint::HALF / 8) {
        #[unroll]
        for e in 0..2usize {
            let behind = comptime!(n * 8 + e);
            if own + behind < sizes.k_len {
                if row0.valid {
                    grad[at0 + behind] = sum.extract(comptime!(n * 4 + e));
                }
                if row1.valid {
                    grad[at1 + behind] = sum.extract(comptime!(n * 4 + 2 + e));
                }
            }
        }
    }
}
