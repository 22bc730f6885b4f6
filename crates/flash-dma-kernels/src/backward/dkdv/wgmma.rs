//! The gradients of k, v and the scores on Hopper's tensor cores: key tiles stream the queries of a chunk.

pub(crate) mod keys;
pub(crate) mod output;
pub(crate) mod queries;
pub(crate) mod steps;
pub(crate) mod weights;

use crate::args::Scaling;
use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::alibi::enter_slopes;
use crate::backward::dkdv::shared::args::{
    BackwardInputs, KeyGradients, KeyGrid, KeyTileSource, QueryBoxes,
};
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::keys::copy_keys;
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::backward::dkdv::shared::queries::{Pairs, StepLses};
use crate::backward::dkdv::shared::steps::StepOrder;
use crate::backward::dkdv::wgmma::keys::LaneKeys;
use crate::backward::dkdv::wgmma::output::{
    add_bias_gradients, repair_keys, write_rows, write_scores,
};
use crate::backward::dkdv::wgmma::queries::{StepCopies, Tiles, clean_stage};
use crate::backward::dkdv::wgmma::steps::{Steps, staged_step};
use crate::backward::dkdv::wgmma::weights::{StepWeights, set_weights, step_weights};
use crate::backward::products::Products;
use crate::matrix::logit_scale::PairKind;
use crate::matrix::ptx::{commit_copies, uniform_bool, wait_copies};
use crate::matrix::wgmma::panel::{Panels, publish};
use crate::matrix::wgmma::product::{finish, finish_but, start_nt, start_pv};
use crate::matrix::wgmma::ring::{Ring, Turns};
use cubecl::prelude::*;

/// `dkdv_mma_kernel` with `wgmma`: the same cubes, buffers and order. A warpgroup owns 64 keys: their rows
/// of K and V lie in shared memory, their dK, dV and dz in its registers. Keys are the rows of all
/// products, so that `P^T` and `dS^T` turn from accumulators into A operands.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dkdv_wgmma_kernel<E: Float, O: Float>(
    inputs: &BackwardInputs<E>,
    source: &KeyTileSource,
    grads: &mut KeyGradients<O>,
    scaling: &Scaling,
    boxes: &QueryBoxes<E>,
    grid: &KeyGrid,
    #[comptime] bp: DkdvBlueprint,
    #[define(E)] _element: ElemType,
    #[define(O)] _output: ElemType,
) {
    let size!(NS) = comptime!(bp.rows / 2);
    let size!(NO) = comptime!(bp.head_dim / 2);
    let size!(NP) = comptime!(bp.rows / 4);
    let warp = UNIT_POS_Y as usize;
    // Computed before the first product, for all of the kernel: otherwise ptxas serialises the products (C7515).
    let quad = UNIT_POS_X as usize % 4;
    let place = ChunkTile::of_cube::<E>(inputs, source, grid, bp);
    let mut tiles = Tiles::<E>::new(bp);
    tiles.bounds.enter(source, &place, bp);
    tiles.forget();
    enter_slopes(&mut tiles.slopes, &inputs.slopes, &place, bp);
    let mut keys = LaneKeys::new(source, &place, &scaling.dropout, bp);
    sync_cube();
    let order = StepOrder::of_cube(source, grid, &place, &tiles.bounds, bp);
    let mut steps = Steps::new(order, bp);
    let mask = KeyMask::new(source, &place, place.start + warp * 16, bp);
    // The head whose biases are loaded for the keys, and whose gradients are summed.
    let mut head = steps.present(bp).head;
    if comptime!(bp.pattern.has_head_bias()) {
        keys.load_biases(&mask, head);
    }
    let pairs = Pairs::new::<E>(inputs, &place, mask, scaling, bp);
    let mut dv = Vector::<f32, NO>::new(0.0f32);
    let mut dk = Vector::<f32, NO>::new(0.0f32);
    let mut weights = StepWeights::<NP> {
        p: Vector::new(0u32),
        ds: Vector::new(0u32),
        dz0: 0.0f32,
        dz1: 0.0f32,
    };

    if steps.count > 0 {
        copy_keys::<E>(inputs, source, &place, &mut tiles.k, &mut tiles.v, bp);
        let stages = comptime!(bp.stages);
        let ring = Ring::new(stages, 1usize, comptime!(bp.units()));
        let turns = Turns::new();
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
            if comptime!(bp.pattern.has_head_bias()) {
                let next = steps.present(bp).head;
                if next != head {
                    add_bias_gradients::<O, NP>(&mut weights, &keys, &place, &pairs, grads, head);
                    head = next;
                    keys.load_biases(&pairs.mask, head);
                }
            }
            let words = steps.seen(turn, &pairs.mask, place.sizes.q_len, bp);
            let q_tile = copies.queries(stage, bp);
            let o_tile = copies.grad_out(stage, bp);
            ring.wait_full(stage, turn / stages);
            turns.wait(turn, comptime!(bp.in_turn()));
            // S^T = K Q^T, followed by dP^T = V dO^T.
            let s = start_products::<NS>(&k_panels, &q_tile, bp);
            let dp = start_products::<NS>(&v_panels, &o_tile, bp);
            turns.pass(turn, steps.count, comptime!(bp.in_turn()));
            steps.refill(turn, &ring, &copies, bp);
            let step = staged_step::<E>(turn, &steps, &words, &mut tiles, &place, &pairs.mask, bp);
            steps.advance_present(turn, bp);
            // Waits for all but dP^T.
            let s = finish_but::<NS>(s, 1usize, comptime!(bp.rows / 2));
            dv = finish_but::<NO>(dv, 1usize, comptime!(bp.head_dim / 2));
            dk = finish_but::<NO>(dk, 1usize, comptime!(bp.head_dim / 2));
            if turn > 0 {
                ring.arrive_empty((turn - 1) % stages);
            }
            let products = Products::<NS> { s, dp };
            step_weights::<E, NS, NP>(
                &mut weights,
                &products,
                inputs,
                &keys,
                &tiles,
                &step,
                &pairs,
            );
            if step.at.not_finite {
                // All warps have their logits: only the products with P and dS remain for this tile.
                clean_stage::<E>(&mut tiles, stage, bp);
            }
            dv = start_sums::<NO, NP>(dv, weights.p, &o_tile, bp);
            dk = start_sums::<NO, NP>(dk, weights.ds, &q_tile, bp);
        }
        dv = finish::<NO>(dv, comptime!(bp.head_dim / 2));
        dk = finish::<NO>(dk, comptime!(bp.head_dim / 2));
        if tiles.found_large() {
            // The rows with a large LSE, by the same steps once more: in the steps above they would take time from all.
            // The ring's barrier makes all stages free.
            let ring = Ring::new(stages, 1usize, comptime!(bp.units()));
            steps.restart(bp);
            steps.fill(&ring, &copies, bp);
            for turn in 0..steps.count {
                let stage = turn % stages;
                if comptime!(bp.pattern.has_head_bias()) {
                    let next = steps.present(bp).head;
                    if next != head {
                        add_bias_gradients::<O, NP>(
                            &mut weights,
                            &keys,
                            &place,
                            &pairs,
                            grads,
                            head,
                        );
                        head = next;
                        keys.load_biases(&pairs.mask, head);
                    }
                }
                let words = steps.seen(turn, &pairs.mask, place.sizes.q_len, bp);
                ring.wait_full(stage, turn / stages);
                steps.refill(turn, &ring, &copies, bp);
                let step =
                    staged_step::<E>(turn, &steps, &words, &mut tiles, &place, &pairs.mask, bp);
                let lses =
                    StepLses::of_head::<E>(inputs, steps.present(bp).head, &step.at, &pairs.rows);
                steps.advance_present(turn, bp);
                if uniform_bool(step.at.large) {
                    let (q_tile, o_tile) = (copies.queries(stage, bp), copies.grad_out(stage, bp));
                    let s = start_products::<NS>(&k_panels, &q_tile, bp);
                    let dp = start_products::<NS>(&v_panels, &o_tile, bp);
                    // Starting a product during the exact probabilities would take registers from the steps above.
                    let s = finish::<NS>(s, comptime!(bp.rows / 2));
                    let products = Products::<NS> { s, dp };
                    let kind = comptime!(PairKind::Large);
                    set_weights::<E, NS, NP>(
                        &mut weights,
                        &products,
                        &lses,
                        &keys,
                        &tiles,
                        &step,
                        &pairs,
                        kind,
                    );
                    if step.at.not_finite {
                        clean_stage::<E>(&mut tiles, stage, bp);
                    }
                    dv = start_sums::<NO, NP>(dv, weights.p, &o_tile, bp);
                    dk = start_sums::<NO, NP>(dk, weights.ds, &q_tile, bp);
                    dv = finish::<NO>(dv, comptime!(bp.head_dim / 2));
                    dk = finish::<NO>(dk, comptime!(bp.head_dim / 2));
                }
                ring.arrive_empty(stage);
            }
        }
    }
    let chunks = place.chunks(grid);
    write_rows::<O, NO>(&dv, &dk, source, &chunks, &keys, quad, grads, scaling.scale);
    if comptime!(bp.pattern.has_head_bias()) {
        add_bias_gradients::<O, NP>(&mut weights, &keys, &place, &pairs, grads, head);
    } else if comptime!(bp.pattern.has_shared_score()) {
        write_scores(&weights, &keys, &mut grads.scores);
    }
    if tiles.found_not_finite() {
        repair_keys::<E, O>(inputs, source, &chunks, &keys, &place, &pairs, grads);
    }
}

/// Starts `keys rows^T`, the products of a warpgroup's keys with a query tile.
#[cube]
pub(crate) fn start_products<NS: Size>(
    keys: &Panels,
    rows: &Panels,
    #[comptime] bp: DkdvBlueprint,
) -> Vector<f32, NS> {
    let (element, columns, head_dim) = comptime!((bp.element, bp.rows, bp.head_dim));
    start_nt::<NS>(keys, rows, element, columns, head_dim)
}

/// Starts `sums += weights rows`.
#[cube]
fn start_sums<NO: Size, NP: Size>(
    sums: Vector<f32, NO>,
    weights: Vector<u32, NP>,
    rows: &Panels,
    #[comptime] bp: DkdvBlueprint,
) -> Vector<f32, NO> {
    let (element, head_dim, columns) = comptime!((bp.element, bp.head_dim, bp.rows));
    start_pv::<NO, NP>(sums, weights, rows, element, head_dim, columns)
}
