//! The gradient of the rank on Hopper's tensor cores.
//!
//! It has the dk/dv kernel's stream of queries without the sums over queries: a warpgroup has registers to spare, and
//! while one computes its sigmoids the tensor cores multiply for another.

use crate::alibi::biased;
use crate::args::Scaling;
use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::alibi::{enter_slopes, row_alibi};
use crate::backward::dkdv::shared::args::{BackwardInputs, KeyGrid, KeyTileSource, QueryBoxes};
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::keys::copy_keys;
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::backward::dkdv::shared::queries::{Pairs, QueryRows, StepLses};
use crate::backward::dkdv::shared::steps::{Cursor, StepOrder};
use crate::backward::dkdv::wgmma::keys::LaneKeys;
use crate::backward::dkdv::wgmma::queries::{StepCopies, Tiles, step_at};
use crate::backward::dkdv::wgmma::start_products;
use crate::backward::dkdv::wgmma::steps::Steps;
use crate::backward::dkdv::wgmma::weights::{StagedStep, selected};
use crate::backward::products::Products;
use crate::backward::rank::terms::write_or_add;
use crate::matrix::fragment::quad_sum;
use crate::matrix::logit_scale::PairKind;
use crate::matrix::ptx::{commit_copies, wait_copies};
use crate::matrix::wgmma::panel::{Panels, publish};
use crate::matrix::wgmma::product::{finish, finish_but};
use crate::matrix::wgmma::ring::Ring;
use crate::rank_terms::{Change, RankTerms};
use cubecl::prelude::*;

/// [`rank_mma_kernel`](crate::backward::rank::mma::rank_mma_kernel) with `wgmma`: the same cubes, buffers and sums. A
/// warpgroup owns 64 keys, whose rows of K and V lie in shared memory.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn rank_wgmma_kernel<E: Float>(
    inputs: &BackwardInputs<E>,
    terms: &RankTerms,
    source: &KeyTileSource,
    rank: &mut [f32],
    scaling: &Scaling,
    boxes: &QueryBoxes<E>,
    grid: &KeyGrid,
    #[comptime] bp: DkdvBlueprint,
    #[define(E)] _element: ElemType,
) {
    let size!(NS) = comptime!(bp.rows / 2);
    let warp = UNIT_POS_Y as usize;
    let place = ChunkTile::of_ranked::<E>(inputs, source, grid, bp);
    let mut tiles = Tiles::<E>::new(bp);
    tiles.bounds.enter(source, &place, bp);
    enter_slopes(&mut tiles.slopes, &inputs.slopes, &place, bp);
    let keys = LaneKeys::new(source, &place, &scaling.dropout, bp);
    sync_cube();
    let order = StepOrder::of_cube(source, grid, &place, &tiles.bounds, bp);
    let mut steps = Steps::new(order, bp);
    let span = (tiles.bounds).span(&place, warp * 16, 16usize);
    let pairs = Pairs::new::<E>(inputs, &place, KeyMask::none(), scaling, bp);
    let own_pairs = OwnPairs { keys, pairs };
    let (pairs, keys) = (&own_pairs.pairs, &own_pairs.keys);
    let mut sums = KeySums {
        upper: 0.0f32,
        lower: 0.0f32,
        change: Change {
            all: terms.change.all,
            kind: comptime!(terms.change.kind),
        },
    };
    if steps.count > 0 {
        copy_keys::<E>(inputs, source, &place, &mut tiles.k, &mut tiles.v, bp);
        let stages = comptime!(bp.stages);
        let ring = Ring::new(stages, 1usize, comptime!(bp.units()));
        let copies = StepCopies::new::<E>(boxes, &tiles, place.batch, &pairs.rows);
        steps.fill(&ring, &copies, bp);
        let own = warp / 4 * comptime!(64 * bp.segments());
        let k_panels = Panels::at::<E>(&tiles.k[own..own + 1]);
        let v_panels = Panels::at::<E>(&tiles.v[own..own + 1]);
        // K and V, of which every warpgroup copied a part.
        commit_copies();
        wait_copies(0u32);
        publish();
        sync_cube();
        for turn in 0..steps.count {
            let stage = turn % stages;
            let of_lse = LseGradients::read(&terms.grad_lse, &pairs.rows, &steps.present(bp), bp);
            ring.wait_full(stage, turn / stages);
            // S^T = K Q^T, followed by dP^T = V dO^T.
            let s = start_products::<NS>(&k_panels, &copies.queries(stage, bp), bp);
            let dp = start_products::<NS>(&v_panels, &copies.grad_out(stage, bp), bp);
            steps.refill(turn, &ring, &copies, bp);
            let query = steps.present(bp).tile * comptime!(bp.queries());
            let mut head = 0usize;
            if comptime!(bp.slopes > 0) {
                // Copied, because the cursor moves on.
                head = steps.present(bp).head;
            }
            let at = step_at::<E>(stage, query, head, span.fills(query, bp), &mut tiles, bp);
            let step = StagedStep {
                at,
                turn,
                stage,
                seen: 0u32,
                learns: false.runtime(),
            };
            steps.advance_present(turn, bp);
            // Waits for all but dP^T.
            let s = finish_but::<NS>(s, 1usize, comptime!(bp.rows / 2));
            let products = Products::<NS> { s, dp };
            let tiles = &tiles;
            let none = StepLses::none::<E>(inputs);
            // Separate code for each kind, as in the dk/dv kernel.
            if span.misses(query, bp) {
                finish::<NS>(products.dp, comptime!(bp.rows / 2));
            } else if step.at.large {
                let lses = steps.lses::<E>(inputs, &step, &pairs.rows, bp);
                let kind = comptime!(PairKind::Large);
                sums.add::<E, NS>(&products, &lses, &of_lse, tiles, &step, &own_pairs, kind);
            } else if step.at.boundary {
                let kind = comptime!(PairKind::Boundary);
                sums.add::<E, NS>(&products, &none, &of_lse, tiles, &step, &own_pairs, kind);
            } else {
                let kind = comptime!(PairKind::Full);
                sums.add::<E, NS>(&products, &none, &of_lse, tiles, &step, &own_pairs, kind);
            }
            ring.arrive_empty(stage);
        }
    }
    sums.write(keys, rank, comptime!(terms.adds));
}

/// The LSE gradients of a step's rows whose columns this lane holds; zeros without.
#[derive(CubeType)]
struct LseGradients {
    values: Array<f32>,
    #[cube(comptime)]
    given: bool,
}

#[cube]
impl LseGradients {
    /// Reads them for the step at `cursor`, before its products so that they arrive meanwhile.
    fn read(
        grad_lse: &ComptimeOption<Box<[f32]>>,
        rows: &QueryRows,
        cursor: &Cursor,
        #[comptime] bp: DkdvBlueprint,
    ) -> LseGradients {
        let given = grad_lse.is_some();
        let mut values = Array::<f32>::new(comptime!(if given { bp.rows / 4 } else { 1 }));
        #[comptime]
        match grad_lse {
            ComptimeOption::Some(grad_lse) => {
                let queries = comptime!(bp.queries());
                #[unroll]
                for i in 0..comptime!(bp.rows / 4) {
                    let row = comptime!(i / 2 * 8 + i % 2) + UNIT_POS_X as usize % 4 * 2;
                    let query = cursor.tile * queries + row % queries;
                    let head = rows.row + (cursor.head + row / queries) * rows.len;
                    // A row past the last query takes part in no pair.
                    values[i] = grad_lse[head + min(query, rows.len - 1)];
                }
            }
            ComptimeOption::None => {}
        }
        LseGradients { values, given }
    }
}

/// This lane's two keys, and the inputs of their pairs with the queries.
#[derive(CubeType)]
struct OwnPairs {
    keys: LaneKeys,
    pairs: Pairs,
}

/// This lane's part of the gradients of the ranks of its two keys.
#[derive(CubeType)]
struct KeySums {
    upper: f32,
    lower: f32,
    /// The change that they are sums for.
    change: Change,
}

#[cube]
impl KeySums {
    /// Adds the contributions of a step; dP is in flight while the sigmoids are computed. Pairs that train no rank,
    /// which a full step does not have, add nothing.
    fn add<E: Float, NS: Size>(
        &mut self,
        products: &Products<NS>,
        lses: &StepLses,
        of_lse: &LseGradients,
        tiles: &Tiles<E>,
        step: &StagedStep,
        own: &OwnPairs,
        #[comptime] kind: PairKind,
    ) {
        let bp = comptime!(own.pairs.bp);
        let boundary = comptime!(kind != PairKind::Full);
        let with_lse = comptime!(of_lse.given);
        let quad = UNIT_POS_X as usize % 4;
        let rows = step.stage * comptime!(bp.rows / 2) + quad;
        let s = &products.s;
        let exact = comptime!(kind == PairKind::Large);
        let exponents = self.exponents::<E, NS>(s, lses, tiles, step, own, exact);
        let mut changes = Vector::<f32, NS>::new(0.0f32);
        let mut weights = Vector::<f32, NS>::new(0.0f32);
        #[unroll]
        for n in 0..comptime!(bp.rows / 8) {
            #[unroll]
            for e in 0..2usize {
                #[unroll]
                for half in 0..2usize {
                    let value = comptime!(n * 4 + half * 2 + e);
                    let above = exponents.extract(value);
                    let weight = self.change.weight_of_power(above);
                    weights.insert(value, weight);
                    if comptime!(with_lse) {
                        let grad = of_lse.values[comptime!(n * 2 + e)];
                        let above = above * comptime!(core::f32::consts::LN_2);
                        changes.insert(value, grad * self.change.part_of_lse(above, weight));
                    }
                }
            }
        }
        let dp = finish::<NS>(products.dp, comptime!(bp.rows / 2));
        #[unroll]
        for n in 0..comptime!(bp.rows / 8) {
            let pair = tiles.rows[rows + comptime!(n * 4)];
            #[unroll]
            for e in 0..2usize {
                let row = comptime!(n * 8 + e) + quad * 2;
                let mut mean = pair.extract(comptime!(2 * e + 1));
                if comptime!(with_lse) {
                    mean += of_lse.values[comptime!(n * 2 + e)];
                }
                let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
                let (dp0, dp1) = (dp.extract(at0) - mean, dp.extract(at1) - mean);
                let mut change0 = weights.extract(at0) * dp0;
                let mut change1 = weights.extract(at1) * dp1;
                if comptime!(with_lse) {
                    change0 += changes.extract(at0);
                    change1 += changes.extract(at1);
                }
                if comptime!(boundary) {
                    let any = pair.extract(comptime!(2 * e)) != f32::new(f32::INFINITY);
                    let runs = selected(&own.keys, any, row, &step.at, 0u32, e);
                    change0 = select(runs.first, change0, 0.0f32);
                    change1 = select(runs.second, change1, 0.0f32);
                }
                self.upper += change0;
                self.lower += change1;
            }
        }
    }

    /// `log2` of the probabilities that the pairs of a step have or would have; if `exact`, by LSEs that may be large.
    fn exponents<E: Float, NS: Size>(
        &self,
        s: &Vector<f32, NS>,
        lses: &StepLses,
        tiles: &Tiles<E>,
        step: &StagedStep,
        own: &OwnPairs,
        #[comptime] exact: bool,
    ) -> Vector<f32, NS> {
        let bp = comptime!(own.pairs.bp);
        let quad = UNIT_POS_X as usize % 4;
        let rows = step.stage * comptime!(bp.rows / 2) + quad;
        let mut exponents = Vector::<f32, NS>::new(0.0f32);
        #[unroll]
        for n in 0..comptime!(bp.rows / 8) {
            let pair = tiles.rows[rows + comptime!(n * 4)];
            #[unroll]
            for e in 0..2usize {
                let reference = pair.extract(comptime!(2 * e));
                let row = comptime!(n * 8 + e) + quad * 2;
                let alibi = row_alibi(&tiles.slopes, &step.at, row, bp);
                #[unroll]
                for half in 0..2usize {
                    let value = comptime!(n * 4 + half * 2 + e);
                    let mut score = own.keys.upper.score;
                    let mut place = own.keys.upper_place;
                    if comptime!(half == 1) {
                        score = own.keys.lower.score;
                        place = own.keys.lower_place;
                    }
                    let score = biased(&alibi, score, place);
                    let product = s.extract(value);
                    let exponent = if comptime!(exact) {
                        let lse = lses.exact(row, bp);
                        let logit = own.pairs.logit_scale.apply(product, score);
                        self.change.above(lse.exponent(logit))
                    } else {
                        (own.pairs.logit_scale).exponent(product, score, reference)
                    };
                    exponents.insert(value, exponent);
                }
            }
        }
        exponents
    }

    /// Writes or adds the sums over the lanes of a quad.
    fn write(&self, keys: &LaneKeys, rank: &mut [f32], #[comptime] adds: bool) {
        let upper = quad_sum(self.upper);
        let lower = quad_sum(self.lower);
        let quad = UNIT_POS_X as usize % 4;
        if quad == 0 {
            if keys.upper.valid {
                write_or_add(rank, keys.upper.row, upper, adds, comptime!(keys.bp));
            }
            if keys.lower.valid {
                write_or_add(rank, keys.lower.row, lower, adds, comptime!(keys.bp));
            }
        }
    }
}
