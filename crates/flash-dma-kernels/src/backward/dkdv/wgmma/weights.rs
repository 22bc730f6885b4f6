//! P and dS of a step of the dk/dv kernel.

use crate::alibi::biased;
use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::alibi::row_alibi;
use crate::backward::dkdv::shared::args::BackwardInputs;
use crate::backward::dkdv::shared::keys::OwnKey;
use crate::backward::dkdv::shared::mask::seen_pair;
use crate::backward::dkdv::shared::queries::{Pairs, Step, StepLses};
use crate::backward::dkdv::wgmma::keys::LaneKeys;
use crate::backward::dkdv::wgmma::queries::{Tiles, query_of};
use crate::backward::products::Products;
use crate::matrix::dropout::{weighed, without_delta};
use crate::matrix::fragment::pack;
use crate::matrix::logit_scale::{PairKind, is_large_scaled};
use crate::matrix::ptx::reciprocal;
use crate::matrix::wgmma::product::finish;
use cubecl::prelude::*;
use flash_dma_problem::OWN_OUTPUT_WEIGHT;

/// The weights of a step's products: a warpgroup's 64 keys are rows, the query tile's rows are columns.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct StepWeights<NP: Size> {
    /// `P^T` and `dS^T`, rounded, as A operands.
    pub p: Vector<u32, NP>,
    pub ds: Vector<u32, NP>,
    /// This lane's part of the gradients of the scores of its two keys, or with `bp.kept` of their ranks: sums over the
    /// steps.
    pub dz0: f32,
    pub dz1: f32,
}

#[derive(CubeType, Clone, Copy)]
pub(crate) struct StagedStep {
    pub at: Step,
    pub turn: usize,
    pub stage: usize,
    /// The selected pairs of a boundary step, in the format of
    /// [`SeenWords::pack`](crate::backward::dkdv::shared::mask::SeenWords::pack); `bp.pattern.is_planned()` only.
    pub seen: u32,
    /// True if all pairs train the ranks of their keys; `bp.kept` only.
    pub learns: bool,
}

/// Sets the weights to those of a step; dP is in flight while P is computed. Rows with a large LSE are left out.
#[cube]
pub(crate) fn step_weights<E: Float, NS: Size, NP: Size>(
    weights: &mut StepWeights<NP>,
    products: &Products<NS>,
    inputs: &BackwardInputs<E>,
    keys: &LaneKeys,
    tiles: &Tiles<E>,
    step: &StagedStep,
    pairs: &Pairs,
) {
    // Separate code for each kind: a branch per element would keep the other instructions from overlapping.
    let none = StepLses::none::<E>(inputs);
    if step.at.boundary {
        let kind = comptime!(PairKind::Boundary);
        set_weights::<E, NS, NP>(weights, products, &none, keys, tiles, step, pairs, kind);
    } else if comptime!(pairs.bp.kept) && step.learns {
        let kind = comptime!(PairKind::Learning);
        set_weights::<E, NS, NP>(weights, products, &none, keys, tiles, step, pairs, kind);
    } else {
        let kind = comptime!(PairKind::Full);
        set_weights::<E, NS, NP>(weights, products, &none, keys, tiles, step, pairs, kind);
    }
}

/// See [`step_weights`]. Sets the weights of pairs that are not selected to zero; if the kind is `Large`, also those of
/// rows without a large LSE.
#[cube]
pub(crate) fn set_weights<E: Float, NS: Size, NP: Size>(
    weights: &mut StepWeights<NP>,
    products: &Products<NS>,
    lses: &StepLses,
    keys: &LaneKeys,
    tiles: &Tiles<E>,
    step: &StagedStep,
    pairs: &Pairs,
    #[comptime] kind: PairKind,
) {
    let (s, logit_scale, bp) = (&products.s, &pairs.logit_scale, comptime!(pairs.bp));
    let quad = UNIT_POS_X as usize % 4;
    let rows = step.stage * comptime!(bp.rows / 2) + quad;
    let boundary = comptime!(!kind.is_full());
    let learn_from = LearnFrom::read(tiles, comptime!(bp.kept && boundary));
    let unrounded = probabilities::<E, NS>(s, lses, keys, tiles, step, pairs, kind);
    let dp = finish::<NS>(products.dp, comptime!(bp.rows / 2));
    let mut p = Vector::<u32, NP>::new(0u32);
    let mut ds = Vector::<u32, NP>::new(0u32);
    let mut dz0 = 0.0f32;
    let mut dz1 = 0.0f32;
    #[unroll]
    for n in 0..comptime!(bp.rows / 8) {
        let pair = tiles.rows[rows + comptime!(n * 4)];
        let mut seen_here = 0u32;
        if comptime!(boundary && bp.pattern.is_planned()) {
            seen_here = seen_pair(step.seen, n, bp);
        }
        let mask = keys.pair_mask(&tiles.words, step.stage, n);
        let mut dss = Vector::<f32, Const<4>>::new(0.0f32);
        #[unroll]
        for e in 0..2usize {
            let row = comptime!(n * 8 + e) + quad * 2;
            let row_delta = pair.extract(comptime!(2 * e + 1));
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let of_pair0 = without_delta(&mask, dp.extract(at0), row_delta, e, false);
            let of_pair1 = without_delta(&mask, dp.extract(at1), row_delta, e, true);
            let mut ds0 = unrounded.extract(at0) * of_pair0;
            let mut ds1 = unrounded.extract(at1) * of_pair1;
            if comptime!(boundary) {
                // A pair that is not selected has a probability of 0, but may have a dP that is not finite.
                let counts = takes_part(pair.extract(comptime!(2 * e)), kind);
                let keep = selected(keys, counts, row, &step.at, seen_here, e);
                ds0 = select(keep.first, ds0, 0.0f32);
                ds1 = select(keep.second, ds1, 0.0f32);
            }
            if comptime!(!bp.kept) {
                dz0 += ds0;
                dz1 += ds1;
            } else if comptime!(kind != PairKind::Full) {
                let mut worth0 = ds0 * of_others(unrounded.extract(at0));
                let mut worth1 = ds1 * of_others(unrounded.extract(at1));
                if comptime!(boundary) {
                    let query = query_of(true, row, &step.at, bp);
                    worth0 = select(query >= learn_from.upper, worth0, 0.0f32);
                    worth1 = select(query >= learn_from.lower, worth1, 0.0f32);
                }
                dz0 += worth0;
                dz1 += worth1;
            }
            if comptime!(bp.softcap) {
                let x0 = logit_scale.apply(s.extract(at0), 0.0f32);
                let x1 = logit_scale.apply(s.extract(at1), 0.0f32);
                ds0 *= logit_scale.slope(x0);
                ds1 *= logit_scale.slope(x1);
            }
            dss.insert(e, ds0);
            dss.insert(comptime!(2 + e), ds1);
        }
        #[unroll]
        for half in 0..2usize {
            let (x, y) = comptime!((half * 2, half * 2 + 1));
            let (px, py) = comptime!((n * 4 + half * 2, n * 4 + half * 2 + 1));
            let x0 = weighed(&mask, unrounded.extract(px), 0usize, half == 1);
            let x1 = weighed(&mask, unrounded.extract(py), 1usize, half == 1);
            let pair = pack(x0, x1, comptime!(bp.element));
            p.insert(comptime!(n * 2 + half), pair);
            let pair = pack(dss.extract(x), dss.extract(y), comptime!(bp.element));
            ds.insert(comptime!(n * 2 + half), pair);
        }
    }
    weights.p = p;
    weights.ds = ds;
    weights.dz0 += dz0;
    weights.dz1 += dz1;
}

/// The factor from the gradient of a kept key's logit, of probability `p`, to what the key is
/// [worth](flash_dma_problem::OWN_OUTPUT_WEIGHT).
#[cube]
fn of_others(p: f32) -> f32 {
    reciprocal(comptime!(1.0 + OWN_OUTPUT_WEIGHT) - p)
}

/// The first queries from which this lane's two keys learn.
#[derive(CubeType, Clone, Copy)]
struct LearnFrom {
    upper: i32,
    lower: i32,
}

#[cube]
impl LearnFrom {
    /// Reads them if they are `asked` for: from shared memory, as the registers are few.
    fn read<E: Float>(tiles: &Tiles<E>, #[comptime] asked: bool) -> LearnFrom {
        let mut upper = 0i32;
        let mut lower = 0i32;
        if comptime!(asked) {
            let learns = tiles.bounds.learns.as_ref().unwrap();
            let local = UNIT_POS_Y as usize * 16 + UNIT_POS_X as usize / 4;
            upper = learns[local];
            lower = learns[local + 8];
        }
        LearnFrom { upper, lower }
    }
}

/// The probabilities of a step's pairs, in f32; 0 where a pair is not selected.
#[cube]
fn probabilities<E: Float, NS: Size>(
    s: &Vector<f32, NS>,
    lses: &StepLses,
    keys: &LaneKeys,
    tiles: &Tiles<E>,
    step: &StagedStep,
    pairs: &Pairs,
    #[comptime] kind: PairKind,
) -> Vector<f32, NS> {
    let (logit_scale, bp) = (&pairs.logit_scale, comptime!(pairs.bp));
    let boundary = comptime!(!kind.is_full());
    let quad = UNIT_POS_X as usize % 4;
    let rows = step.stage * comptime!(bp.rows / 2) + quad;
    let bias = PairBiases::read(pairs, keys, step);
    let mut unrounded = Vector::<f32, NS>::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(bp.rows / 8) {
        let pair = tiles.rows[rows + comptime!(n * 4)];
        let mut seen_here = 0u32;
        if comptime!(boundary && bp.pattern.is_planned()) {
            seen_here = seen_pair(step.seen, n, bp);
        }
        #[unroll]
        for e in 0..2usize {
            let row = comptime!(n * 8 + e) + quad * 2;
            let reference = pair.extract(comptime!(2 * e));
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let alibi = row_alibi(&tiles.slopes, &step.at, row, bp);
            let z0 = bias.of(&keys.upper, n, e, false, bp);
            let z0 = biased(&alibi, z0, keys.upper_place);
            let z1 = bias.of(&keys.lower, n, e, true, bp);
            let z1 = biased(&alibi, z1, keys.lower_place);
            let (s0, s1) = (s.extract(at0), s.extract(at1));
            if comptime!(kind == PairKind::Large) {
                let lse = lses.exact(row, bp);
                let p0 = lse.probability(logit_scale.apply(s0, z0));
                let p1 = lse.probability(logit_scale.apply(s1, z1));
                unrounded.insert(at0, p0);
                unrounded.insert(at1, p1);
            } else {
                let p0 = logit_scale.weight(s0, z0, reference);
                let p1 = logit_scale.weight(s1, z1, reference);
                unrounded.insert(at0, p0);
                unrounded.insert(at1, p1);
            }
            if comptime!(boundary) {
                let counts = takes_part(reference, kind);
                let keep = selected(keys, counts, row, &step.at, seen_here, e);
                unrounded.insert(at0, select(keep.first, unrounded.extract(at0), 0.0f32));
                unrounded.insert(at1, select(keep.second, unrounded.extract(at1), 0.0f32));
            }
        }
    }
    unrounded
}

/// True if a row with this reference takes part: it sees a key, and its LSE is large exactly if the kind is `Large`.
#[cube]
fn takes_part(reference: f32, #[comptime] kind: PairKind) -> bool {
    if comptime!(kind == PairKind::Large) {
        is_large_scaled(reference)
    } else {
        reference.abs() != f32::new(f32::INFINITY)
    }
}

/// A flag for each of this lane's two keys: a query selects it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Selected {
    pub first: bool,
    pub second: bool,
}

/// Tests whether row `row` of a step's tile selects the two keys, if it `counts`; `seen` is the result of
/// [`seen_pair`], in which the row has bit `16 e`.
#[cube]
pub(crate) fn selected(
    keys: &LaneKeys,
    counts: bool,
    row: usize,
    step: &Step,
    seen: u32,
    #[comptime] e: usize,
) -> Selected {
    let bp = comptime!(keys.bp);
    if comptime!(bp.pattern.is_planned()) {
        Selected {
            first: counts && seen & comptime!(1u32 << (16 * e)) != 0u32,
            second: counts && seen & comptime!(256u32 << (16 * e)) != 0u32,
        }
    } else {
        let query = query_of(counts, row, step, bp);
        Selected {
            first: keys.upper.first <= query && query < keys.upper.end,
            second: keys.lower.first <= query && query < keys.lower.end,
        }
    }
}

/// The biases of the pairs of this lane's two keys and its columns of a step; `bp.pattern.has_pair_bias()` only.
#[derive(CubeType)]
struct PairBiases {
    /// The biases of both keys for each query whose columns the lane holds, in the order of the columns.
    values: Array<f32>,
}

/// Number of groups of eight rows of a step's tile with distinct queries; the heads of the tile repeat them.
fn eights(bp: DkdvBlueprint) -> usize {
    (bp.queries() / 8).max(1)
}

#[cube]
impl PairBiases {
    fn read(pairs: &Pairs, keys: &LaneKeys, step: &StagedStep) -> PairBiases {
        let (mask, bp) = (&pairs.mask, comptime!(pairs.bp));
        let mut values = Array::<f32>::new(comptime!(if bp.pattern.has_pair_bias() {
            4 * eights(bp)
        } else {
            1
        }));
        if comptime!(bp.pattern.has_pair_bias()) {
            let (behind0, behind1) = (keys.upper.behind(mask), keys.lower.behind(mask));
            #[unroll]
            for n in 0..comptime!(eights(bp)) {
                #[unroll]
                for e in 0..2usize {
                    let row = comptime!(n * 8 + e) + UNIT_POS_X as usize % 4 * 2;
                    let query = min(
                        step.at.query + row % comptime!(bp.queries()),
                        pairs.rows.len - 1,
                    );
                    values[comptime!(n * 4 + e * 2)] = mask.bias(step.at.head, query, behind0);
                    values[comptime!(n * 4 + e * 2 + 1)] = mask.bias(step.at.head, query, behind1);
                }
            }
        }
        PairBiases { values }
    }

    /// The bias of one of the two keys (the second if `lower`) and element `e` of its columns of the `n`-th eight rows;
    /// without `bp.pattern.has_pair_bias()` its score.
    fn of(
        &self,
        key: &OwnKey,
        #[comptime] n: usize,
        #[comptime] e: usize,
        #[comptime] lower: bool,
        #[comptime] bp: DkdvBlueprint,
    ) -> f32 {
        let mut z = key.score;
        if comptime!(bp.pattern.has_pair_bias()) {
            z = self.values[comptime!(n % eights(bp) * 4 + e * 2 + lower as usize)];
        }
        z
    }
}
