//! The weights of pairs: probabilities, and gradients of the logits.

use crate::alibi::biased;
use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::mma::keys::{CappedLogit, LaneKeys, local_key};
use crate::backward::dkdv::mma::queries::{Tiles, lse_of, query_of};
use crate::backward::dkdv::mma::warp::{WarpStep, WarpSums};
use crate::backward::dkdv::shared::alibi::{local_place, row_alibi};
use crate::backward::dkdv::shared::dropout::words_of_rows;
use crate::backward::dkdv::shared::mask::seen_pair;
use crate::backward::dkdv::shared::queries::StepLses;
use crate::dropout::DropoutArg;
use crate::matrix::dropout::{PairMask, weighed, without_delta};
use crate::matrix::fragment::pack;
use crate::matrix::logit_scale::{ExactLse, exp_of};
use cubecl::prelude::*;

/// The weight that marks a pair as not selected.
const NOT_SELECTED: f32 = -1.0;
/// The mark with dropout, where dropped pairs are negative probabilities.
const NOT_SELECTED_OR_DROPPED: f32 = f32::NEG_INFINITY;
/// The mark among capped products.
const NOT_SELECTED_CAPPED: f32 = f32::INFINITY;

fn not_selected(bp: DkdvBlueprint) -> f32 {
    match (bp.softcap, bp.dropout) {
        (true, _) => NOT_SELECTED_CAPPED,
        (_, false) => NOT_SELECTED,
        (_, true) => NOT_SELECTED_OR_DROPPED,
    }
}

/// The dropout mask of the two keys of fragment `m` and two queries with these words.
#[cube]
fn fragment_mask(
    dropout: &DropoutArg,
    columns: &ComptimeOption<Shared<[u32]>>,
    words: &ComptimeOption<Vector<u32, Const<2>>>,
    #[comptime] m: usize,
    #[comptime] bp: DkdvBlueprint,
) -> ComptimeOption<PairMask> {
    #[comptime]
    match dropout {
        ComptimeOption::Some(seed) => {
            let (keys, words) = (columns.as_ref().unwrap(), words.as_ref().unwrap());
            ComptimeOption::new_Some(PairMask {
                upper: keys[local_key(comptime!(m * 2), bp)],
                lower: keys[local_key(comptime!(m * 2 + 1), bp)],
                columns: *words,
                seed: seed.copied(),
            })
        }
        ComptimeOption::None => ComptimeOption::new_None(),
    }
}

/// A probability for the second role: negative if the pair is dropped. For 0 and NaN the sign does not matter.
#[cube]
fn marked(
    mask: &ComptimeOption<PairMask>,
    p: f32,
    #[comptime] e: usize,
    #[comptime] lower: bool,
) -> f32 {
    #[comptime]
    match mask {
        ComptimeOption::Some(mask) => select(mask.drops(e, lower), -p, p),
        ComptimeOption::None => p,
    }
}

/// The number that a selected pair hands to the second role, see [`Tiles::weights`].
#[cube]
fn handed_on(
    mask: &ComptimeOption<PairMask>,
    logit: &CappedLogit,
    p: f32,
    #[comptime] e: usize,
    #[comptime] lower: bool,
    #[comptime] bp: DkdvBlueprint,
) -> f32 {
    if comptime!(bp.softcap) {
        logit.capped
    } else {
        marked(mask, p, e, lower)
    }
}

/// The probability that was [`marked`]; with dropout 0 for a pair of a `boundary` step that is not selected.
#[cube]
fn unmarked(dropout: &DropoutArg, weight: f32, #[comptime] boundary: bool) -> f32 {
    #[comptime]
    match dropout {
        ComptimeOption::Some(_) => {
            if comptime!(boundary) {
                let none = f32::new(NOT_SELECTED_OR_DROPPED);
                select(weight == none, 0.0f32, weight.abs())
            } else {
                weight.abs()
            }
        }
        ComptimeOption::None => weight,
    }
}

/// `m dp - delta` of a pair whose probability was [`marked`], where `m` is the factor of the probability.
#[cube]
fn of_marked(dropout: &DropoutArg, weight: f32, dp: f32, delta: f32) -> f32 {
    #[comptime]
    match dropout {
        ComptimeOption::Some(seed) => {
            let factor = select(weight < 0.0f32, 0.0f32, seed.factor);
            fma(factor, dp, -delta)
        }
        ComptimeOption::None => dp - delta,
    }
}

/// A flag for each of a lane's two queries: it selects the key.
#[derive(CubeType, Clone, Copy)]
struct Keep {
    first: bool,
    second: bool,
}

/// Location of this lane's weights of the eight query rows `8 n ..` of fragment `m`, for step `step`.
#[cube]
fn weight_place(
    step: usize,
    #[comptime] n: usize,
    #[comptime] m: usize,
    #[comptime] bp: DkdvBlueprint,
) -> usize {
    let lane = UNIT_POS_X as usize;
    let warp = step % 2 * comptime!(bp.role_warps) + UNIT_POS_Y as usize % comptime!(bp.role_warps);
    (warp * comptime!(bp.fragments * (bp.rows / 8)) + comptime!(m * (bp.rows / 8) + n)) * 32 + lane
}

/// The probability of a logit, by the result of [`lse_of`].
#[cube]
fn probability(logit: f32, lse: &ExactLse, #[comptime] boundary: bool) -> f32 {
    if comptime!(boundary) {
        lse.probability(logit)
    } else {
        exp_of(logit, lse.rest)
    }
}

/// The probabilities of the query rows `8 n ..`, as one half of the A fragments `a`; also stores to shared memory the
/// numbers from which the second role computes them again, see [`Tiles::weights`]. On a `boundary` step the selected
/// pairs are given by `bounds` or, if `bp.pattern.is_planned()`, by the step's own words.
#[cube]
pub(crate) fn probabilities<E: Float, NS: Size, NA: Size>(
    a: Vector<u32, NA>,
    lses: &StepLses,
    step: &WarpStep,
    bounds: &Array<i32>,
    tiles: &mut Tiles<E>,
    s: &Array<Vector<f32, NS>>,
    keys: &LaneKeys,
    #[comptime] n: usize,
    #[comptime] boundary: bool,
) -> Vector<u32, NA> {
    let bp = comptime!(keys.bp);
    let mut a = a;
    let stage = step.turn % comptime!(bp.stages);
    let row = comptime!(n * 8) + UNIT_POS_X as usize % 4 * 2;
    let at = &step.at;
    let lse0 = lse_of::<E>(lses, &*tiles, row, stage, at, boundary, bp);
    let lse1 = lse_of::<E>(lses, &*tiles, row + 1, stage, at, boundary, bp);
    let mut query0 = 0i32;
    let mut query1 = 0i32;
    if comptime!(boundary && !bp.pattern.is_planned()) {
        query0 = query_of::<E>(&*tiles, row, stage, &step.at, bp);
        query1 = query_of::<E>(&*tiles, row + 1, stage, &step.at, bp);
    }
    let words = words_of_rows(&tiles.words, stage, row, bp);
    let alibi0 = row_alibi(&tiles.slopes, &step.at, row, bp);
    let alibi1 = row_alibi(&tiles.slopes, &step.at, row + 1, bp);
    #[unroll]
    for m in 0..comptime!(bp.fragments) {
        let (index, first) = comptime!(bp.products().place(m, n));
        let mask = fragment_mask(&keys.dropout, &tiles.columns, &words, m, bp);
        let mut weights = Vector::<f32, Const<4>>::new(0.0f32);
        let mut seen_here = 0u32;
        if comptime!(boundary && bp.pattern.is_planned()) {
            seen_here = seen_pair(step.seen[m], n, bp);
        }
        #[unroll]
        for lower in 0..2usize {
            let key = comptime!(m * 2 + lower);
            let (at0, at1) = comptime!((lower * 2, lower * 2 + 1));
            let z = keys.score(key);
            let s0: f32 = s[index].extract(comptime!(first + at0));
            let s1: f32 = s[index].extract(comptime!(first + at1));
            let place = local_place(&tiles.places, local_key(key, bp));
            let (z0, z1) = (biased(&alibi0, z, place), biased(&alibi1, z, place));
            let (first, second) = (keys.logit_of(s0, z0), keys.logit_of(s1, z1));
            let mut p0 = probability(first.logit, &lse0, boundary);
            let mut p1 = probability(second.logit, &lse1, boundary);
            let w0 = handed_on(&mask, &first, p0, 0usize, lower == 1, bp);
            let w1 = handed_on(&mask, &second, p1, 1usize, lower == 1, bp);
            if comptime!(boundary) {
                let none = f32::new(comptime!(not_selected(bp)));
                let keep = if comptime!(bp.pattern.is_planned()) {
                    // A query that sees nothing has an LSE of -inf.
                    let infinite = f32::new(f32::INFINITY);
                    let own = comptime!(1u32 << (8 * lower));
                    Keep {
                        first: lse0.rest != infinite && seen_here & own != 0u32,
                        second: lse1.rest != infinite && seen_here & comptime!(own << 16) != 0u32,
                    }
                } else {
                    let (first, end) = (bounds[key * 2], bounds[key * 2 + 1]);
                    Keep {
                        first: first <= query0 && query0 < end,
                        second: first <= query1 && query1 < end,
                    }
                };
                weights.insert(at0, select(keep.first, w0, none));
                weights.insert(at1, select(keep.second, w1, none));
                p0 = select(keep.first, p0, 0.0f32);
                p1 = select(keep.second, p1, 0.0f32);
            } else {
                weights.insert(at0, w0);
                weights.insert(at1, w1);
            }
            let x = weighed(&mask, p0, 0usize, lower == 1);
            let y = weighed(&mask, p1, 1usize, lower == 1);
            let packed = pack(x, y, comptime!(bp.element));
            a.insert(comptime!(m * 4 + n % 2 * 2 + lower), packed);
        }
        tiles.weights[weight_place(step.turn, n, m, bp)] = weights;
    }
    a
}

/// The gradients of the logits' products of the query rows `8 n ..` of step `step`, as one half of the A fragments `a`,
/// from its products `V dO^T`; adds the gradients of the logits to the sums.
#[cube]
pub(crate) fn score_gradients<E: Float, NS: Size, NO: Size, NA: Size>(
    a: Vector<u32, NA>,
    lses: &StepLses,
    step: &WarpStep,
    tiles: &Tiles<E>,
    sums: &mut WarpSums<NS, NO>,
    keys: &LaneKeys,
    #[comptime] n: usize,
    #[comptime] boundary: bool,
) -> Vector<u32, NA> {
    let bp = comptime!(keys.bp);
    let mut a = a;
    let turn = step.turn;
    let row = comptime!(n * 8) + UNIT_POS_X as usize % 4 * 2;
    let stage = turn % comptime!(bp.stages);
    let first_row = stage * comptime!(bp.rows) + row;
    let words = words_of_rows(&tiles.words, stage, row, bp);
    #[unroll]
    for m in 0..comptime!(bp.fragments) {
        let (index, first) = comptime!(bp.products().place(m, n));
        let weights = tiles.weights[weight_place(turn, n, m, bp)];
        let mask = fragment_mask(&keys.dropout, &tiles.columns, &words, m, bp);
        #[unroll]
        for lower in 0..2usize {
            let key = comptime!(m * 2 + lower);
            let mut values = Vector::<f32, Const<2>>::new(0.0f32);
            #[unroll]
            for e in 0..2usize {
                let weight = weights.extract(comptime!(lower * 2 + e));
                let dp: f32 = sums.products[index].extract(comptime!(first + lower * 2 + e));
                let delta = tiles.delta[first_row + e];
                if comptime!(bp.softcap) {
                    // Neither the slope nor, if a large number is added, the product can be recovered from a
                    // probability.
                    let at = &step.at;
                    let lse = lse_of::<E>(lses, tiles, row + e, stage, at, boundary, bp);
                    let alibi = row_alibi(&tiles.slopes, &step.at, row + e, bp);
                    let place = local_place(&tiles.places, local_key(key, bp));
                    let x = weight + biased(&alibi, keys.score(key), place);
                    let p = probability(x, &lse, boundary);
                    let mut ds = p * without_delta(&mask, dp, delta, e, lower == 1);
                    let mut slope = keys.slope(weight);
                    if comptime!(boundary) {
                        let none = f32::new(NOT_SELECTED_CAPPED);
                        ds = select(weight == none, 0.0f32, ds);
                        slope = select(weight == none, 0.0f32, slope);
                    }
                    sums.scores[key] += ds;
                    values.insert(e, ds * slope);
                } else {
                    let p = unmarked(&keys.dropout, weight, boundary);
                    let mut ds = p * of_marked(&keys.dropout, weight, dp, delta);
                    if comptime!(boundary && bp.dropout) {
                        ds = select(weight == f32::new(NOT_SELECTED_OR_DROPPED), 0.0f32, ds);
                    } else if comptime!(boundary) {
                        ds = select(p < 0.0f32, 0.0f32, ds);
                    }
                    sums.scores[key] += ds;
                    values.insert(e, ds);
                }
            }
            let (x, y) = (values.extract(0usize), values.extract(1usize));
            let packed = pack(x, y, comptime!(bp.element));
            a.insert(comptime!(m * 4 + n % 2 * 2 + lower), packed);
        }
    }
    a
}
