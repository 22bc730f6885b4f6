//! The gradients of k, v and the scores on Hopper's tensor cores: key tiles stream the queries of a chunk.

pub(crate) mod output;
pub(crate) mod queries;
pub(crate) mod steps;
pub(crate) mod weights;

use crate::args::Scaling;
use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::{
    BackwardInputs, KeyGradients, KeyGrid, KeyTileSource, QueryBoxes,
};
use crate::backward::dkdv::shared::keys::{ChunkTile, own_key, query_range, score_row};
use crate::backward::dkdv::shared::mask::{KeyMask, StepList};
use crate::backward::dkdv::shared::queries::QueryRows;
use crate::backward::dkdv::wgmma::output::{add_scores, write_row, write_score, zero_not_finite};
use crate::backward::dkdv::wgmma::queries::{StepCopies, Tiles, step_at};
use crate::backward::dkdv::wgmma::steps::Steps;
use crate::backward::dkdv::wgmma::weights::{StepWeights, step_weights};
use crate::backward::repair::repair_key;
use crate::matrix::fragment::quad_sum;
use crate::matrix::logits::LogitScale;
use crate::matrix::ptx::{commit_copies, wait_copies};
use crate::matrix::stages::RowAddress;
use crate::matrix::wgmma::panel::{Panels, group_place, publish};
use crate::matrix::wgmma::product::{finish, finish_but, start_nt, start_pv};
use crate::matrix::wgmma::ring::{Ring, Turns};
use cubecl::prelude::barrier::copy_async;
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
    let chunks = comptime!(bp.chunks());
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let quad = lane % 4;
    let unit = UNIT_POS as usize;
    let (q_heads, q_len) = (inputs.q.shape(1), inputs.q.shape(2));
    let (kv_heads, k_len) = (inputs.k.shape(1), inputs.k.shape(2));
    let group = q_heads / kv_heads;

    let place = ChunkTile::of_cube(source, grid, kv_heads, q_len, k_len, bp);
    let (batch, kv_head) = (place.batch, place.kv_head);
    let (start, count, list_row) = (place.start, place.count, place.list_row);

    let mut tiles = Tiles::<E>::new(bp);
    if comptime!(!bp.pattern.is_planned()) && unit < comptime!(bp.keys()) {
        let own = own_key(unit, &place, source, 0usize, false, bp);
        tiles.first[unit] = own.first;
        tiles.end[unit] = own.end;
    }
    let score_row = score_row(&source.scores, batch, kv_head, bp);
    let slot0 = warp * 16 + lane / 4;
    let mut key0 = own_key(
        slot0,
        &place,
        source,
        score_row,
        comptime!(bp.pattern.has_shared_score()),
        bp,
    );
    let mut key1 = own_key(
        slot0 + 8,
        &place,
        source,
        score_row,
        comptime!(bp.pattern.has_shared_score()),
        bp,
    );
    sync_cube();
    let mut steps = if comptime!(bp.pattern.is_planned()) {
        let (tiles, capacity) = (grid.slots as usize, grid.capacity as usize);
        let tile = CUBE_POS_X as usize % tiles;
        let list = StepList::new(
            &source.list,
            &source.counts,
            batch,
            kv_head,
            tile,
            tiles,
            capacity,
        );
        Steps::listed(list)
    } else {
        let range = query_range(&tiles.first, &tiles.end, &place, bp);
        Steps::of_range(&range, group, bp)
    };
    let first_key = start + warp * 16;
    let mask = KeyMask::new(
        &source.scores,
        &source.counts,
        &source.intervals,
        batch,
        kv_head,
        q_heads,
        group,
        first_key,
        k_len,
        bp,
    );
    // The head whose biases are loaded for the keys.
    let mut head = steps.present(bp).head;
    if comptime!(bp.pattern.has_head_bias()) {
        key0.bias(&mask, head);
        key1.bias(&mask, head);
    }

    let rows = QueryRows::new::<E>(&inputs.q, &inputs.grad_out, batch, kv_head, group);
    let logit_scale = LogitScale::new(scaling, bp.softcap);
    let mut dv = Vector::<f32, NO>::new(0.0f32);
    let mut dk = Vector::<f32, NO>::new(0.0f32);
    let mut weights = StepWeights::<NP> {
        p: Vector::new(0u32),
        ds: Vector::new(0u32),
        dz0: 0.0f32,
        dz1: 0.0f32,
    };
    let mut any_broken = false;

    if steps.count > 0 {
        let k_rows = RowAddress::of::<E>(&inputs.k, batch, kv_head);
        let v_rows = RowAddress::of::<E>(&inputs.v, batch, kv_head);
        let mut at = unit;
        while at < comptime!(bp.keys() * bp.chunks()) {
            let (row, col) = (at / chunks, at % chunks);
            let place = group_place(row, col, chunks);
            if start + row < count {
                let mut key = start + row;
                if comptime!(bp.pattern.has_intervals()) {
                    key = source.list[list_row + row] as usize;
                }
                let from = k_rows.base + key * k_rows.stride + col;
                copy_async(
                    &inputs.k[from..from + 1],
                    &mut tiles.k[place..place + 1],
                    8u32,
                );
                let from = v_rows.base + key * v_rows.stride + col;
                copy_async(
                    &inputs.v[from..from + 1],
                    &mut tiles.v[place..place + 1],
                    8u32,
                );
            } else {
                tiles.k[place] = Vector::new(E::from_int(0));
                tiles.v[place] = Vector::new(E::from_int(0));
            }
            at += comptime!(bp.units());
        }
        let stages = comptime!(bp.stages);
        let ring = Ring::new(stages, 1usize, comptime!(bp.units()));
        let turns = Turns::new();
        let copies =
            StepCopies::new::<E>(&boxes.q, &boxes.grad_out, &boxes.rows, &tiles, batch, &rows);
        let ahead = comptime!(bp.stages - 2);
        #[unroll]
        for turn in 0..ahead {
            if turn < steps.count {
                if unit == 0 {
                    copies.start(&ring, &steps.coming(turn, bp), turn, bp);
                }
                steps.advance_coming(bp);
            }
        }
        let own = warp / 4 * comptime!(64 * bp.chunks());
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
                    let row = (batch * q_heads + rows.head + head) * k_len;
                    add_scores(&mut weights, &key0, &key1, &mut grads.scores, row);
                    head = next;
                    key0.bias(&mask, head);
                    key1.bias(&mask, head);
                }
            }
            let words = steps.seen(turn, &mask, q_len, bp);
            let q_tile = copies.queries(stage, bp);
            let o_tile = copies.grad_out(stage, bp);
            ring.wait_full(stage, turn / stages);
            turns.wait(turn, comptime!(bp.fragments));
            // S^T = K Q^T, followed by dP^T = V dO^T.
            let s = start_nt::<NS>(
                &k_panels,
                &q_tile,
                comptime!(bp.element),
                comptime!(bp.rows),
                comptime!(bp.head_dim),
            );
            let dp = start_nt::<NS>(
                &v_panels,
                &o_tile,
                comptime!(bp.element),
                comptime!(bp.rows),
                comptime!(bp.head_dim),
            );
            turns.pass(turn, steps.count, comptime!(bp.fragments));
            if turn + ahead < steps.count {
                if unit == 0 {
                    if turn >= 2 {
                        ring.wait_empty((turn - 2) % stages, (turn - 2) / stages);
                    }
                    let step = steps.coming(turn + ahead, bp);
                    copies.start(&ring, &step, turn + ahead, bp);
                }
                steps.advance_coming(bp);
            }
            let present = steps.present(bp);
            let query = present.tile * comptime!(bp.queries());
            let mut step_head = 0usize;
            if comptime!(bp.pattern.has_pair_bias()) {
                // Copied, because `present` aliases the cursor's variables, which advance before the biases are read.
                step_head = present.head;
            }
            let step = step_at::<E>(stage, query, steps.is_whole(turn, bp), &tiles, bp);
            let mut seen = 0u32;
            if comptime!(bp.pattern.is_planned()) {
                // After the products: the words have arrived by now.
                if step.boundary {
                    seen = words.pack(query, &mask, q_len, k_len, 0usize, bp);
                }
            }
            steps.advance_present(turn, bp);
            // Waits for all but dP^T.
            let s = finish_but::<NS>(s, 1usize, comptime!(bp.rows / 2));
            dv = finish_but::<NO>(dv, 1usize, comptime!(bp.head_dim / 2));
            dk = finish_but::<NO>(dk, 1usize, comptime!(bp.head_dim / 2));
            if turn > 0 {
                ring.arrive_empty((turn - 1) % stages);
            }
            // Separate code for boundary steps: a branch per element would prevent the other instructions from
            // overlapping.
            if step.boundary {
                step_weights::<E, NS, NP>(
                    &mut weights,
                    &s,
                    dp,
                    &key0,
                    &key1,
                    &tiles,
                    stage,
                    &step,
                    seen,
                    &mask,
                    step_head,
                    q_len,
                    &logit_scale,
                    true,
                    bp,
                );
            } else {
                step_weights::<E, NS, NP>(
                    &mut weights,
                    &s,
                    dp,
                    &key0,
                    &key1,
                    &tiles,
                    stage,
                    &step,
                    seen,
                    &mask,
                    step_head,
                    q_len,
                    &logit_scale,
                    false,
                    bp,
                );
            }
            if step.broken {
                // All warps have their logits: only the products with P and dS remain for this tile.
                any_broken = true;
                sync_cube();
                zero_not_finite::<E>(&mut tiles.q, stage, bp);
                zero_not_finite::<E>(&mut tiles.grad_out, stage, bp);
                publish();
                sync_cube();
            }
            dv = start_pv::<NO, NP>(
                dv,
                weights.p,
                &o_tile,
                comptime!(bp.element),
                comptime!(bp.head_dim),
                comptime!(bp.rows),
            );
            dk = start_pv::<NO, NP>(
                dk,
                weights.ds,
                &q_tile,
                comptime!(bp.element),
                comptime!(bp.head_dim),
                comptime!(bp.rows),
            );
        }
    }
    dv = finish::<NO>(dv, comptime!(bp.head_dim / 2));
    dk = finish::<NO>(dk, comptime!(bp.head_dim / 2));
    if key0.valid {
        let at = key0.row * comptime!(bp.head_dim / 2) + quad;
        write_row::<O, NO>(&mut grads.v, &dv, at, 1.0f32, 0usize, bp);
        write_row::<O, NO>(&mut grads.k, &dk, at, scaling.scale, 0usize, bp);
    }
    if key1.valid {
        let at = key1.row * comptime!(bp.head_dim / 2) + quad;
        write_row::<O, NO>(&mut grads.v, &dv, at, 1.0f32, 1usize, bp);
        write_row::<O, NO>(&mut grads.k, &dk, at, scaling.scale, 1usize, bp);
    }
    if comptime!(bp.pattern.has_head_bias()) {
        let row = (batch * q_heads + rows.head + head) * k_len;
        add_scores(&mut weights, &key0, &key1, &mut grads.scores, row);
    } else if comptime!(bp.pattern.has_intervals() || bp.pattern.has_key_bias()) {
        let dz0 = quad_sum(weights.dz0);
        let dz1 = quad_sum(weights.dz1);
        if quad == 0 {
            if key0.valid {
                write_score(&mut grads.scores, key0.row, dz0, bp);
            }
            if key1.valid {
                write_score(&mut grads.scores, key1.row, dz1, bp);
            }
        }
    }
    if any_broken {
        // What the zeroed elements of dO and Q would have added.
        let k_rows = RowAddress::of::<E>(&inputs.k, batch, kv_head);
        repair_key::<E, O>(
            inputs,
            &key0,
            &k_rows,
            &rows,
            &mask,
            &logit_scale,
            &mut grads.v,
            true,
            bp,
        );
        repair_key::<E, O>(
            inputs,
            &key0,
            &k_rows,
            &rows,
            &mask,
            &logit_scale,
            &mut grads.k,
            false,
            bp,
        );
        repair_key::<E, O>(
            inputs,
            &key1,
            &k_rows,
            &rows,
            &mask,
            &logit_scale,
            &mut grads.v,
            true,
            bp,
        );
        repair_key::<E, O>(
            inputs,
            &key1,
            &k_rows,
            &rows,
            &mask,
            &logit_scale,
            &mut grads.k,
            false,
            bp,
        );
    }
}
