//! The gradients of k, v and the scores on Hopper's tensor cores: key tiles stream the queries of a chunk.

use super::output::{write_row, write_score, zero_not_finite};
use crate::backward::mma::{
    DkdvBlueprint, QueryRows, STAGES, Step, Tiles, copy_queries, own_key, query_range, repair_key,
};
use crate::forward::mma::{LogitScale, RowAddress, exp_of};
use crate::tile::mma::{Chunk, commit_copies, quad_sum, wait_copies};
use crate::tile::wgmma::{Panels, group_place, multiply_pv, multiply_two_nt, pack, publish};
use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

/// `dkdv_mma_kernel` with `wgmma`: the same cubes, buffers and order. A warpgroup owns 64 keys: their rows
/// of K and V lie in shared memory, their dK, dV and dz in its registers. Keys are the rows of all
/// products, so that `P^T` and `dS^T` turn from accumulators into A operands.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(in crate::backward) fn dkdv_wgmma_kernel<E: Float, O: Float>(
    q: &Tensor<Chunk<E>>,
    k: &Tensor<Chunk<E>>,
    v: &Tensor<Chunk<E>>,
    grad_out: &Tensor<Chunk<E>>,
    lse: &[f32],
    delta: &[f32],
    scores: &Tensor<f32>,
    intervals: &[Vector<u32, Const<2>>],
    list: &[u32],
    counts: &[u32],
    grad_k: &mut [Vector<O, Const<2>>],
    grad_v: &mut [Vector<O, Const<2>>],
    grad_scores: &mut [f32],
    scale: f32,
    softcap: f32,
    chunk: u32,
    chunk_count: u32,
    slots: u32,
    capacity: u32,
    #[comptime] bp: DkdvBlueprint,
    #[define(E)] _element: ElemType,
    #[define(O)] _output: ElemType,
) {
    let size!(NS) = comptime!(bp.rows);
    let size!(NO) = comptime!(bp.head_dim / 2);
    let size!(NP) = comptime!(bp.rows / 4);
    let chunks = comptime!(bp.chunks());
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let quad = lane % 4;
    let unit = UNIT_POS as usize;
    let (q_heads, q_len) = (q.shape(1), q.shape(2));
    let (kv_heads, k_len) = (k.shape(1), k.shape(2));
    let group = q_heads / kv_heads;

    let item = CUBE_POS_X as usize / slots as usize;
    let kv_row = item / chunk_count as usize;
    let (batch, kv_head) = (kv_row / kv_heads, kv_row % kv_heads);
    let start = CUBE_POS_X as usize % slots as usize * comptime!(bp.keys());
    let chunk_first = (item % chunk_count as usize * chunk as usize) as i32;
    let chunk_end = min(chunk_first + chunk as i32, q_len as i32);
    let mut count = k_len;
    if comptime!(bp.sparse) {
        count = counts[item] as usize;
    }
    if start >= count {
        terminate!();
    }

    let list_row = item * capacity as usize + start;
    let mut tiles = Tiles::<E>::new(bp);
    if unit < comptime!(bp.keys()) {
        let own = own_key(
            unit,
            start,
            count,
            list,
            list_row,
            scores,
            0usize,
            intervals,
            kv_row * k_len,
            q_len,
            k_len,
            chunk_first,
            chunk_end,
            false,
            bp,
        );
        tiles.first[unit] = own.first;
        tiles.end[unit] = own.end;
    }
    let score_row = batch * scores.stride(0) + kv_head * scores.stride(1);
    let slot0 = warp * 16 + lane / 4;
    let key0 = own_key(
        slot0,
        start,
        count,
        list,
        list_row,
        scores,
        score_row,
        intervals,
        kv_row * k_len,
        q_len,
        k_len,
        chunk_first,
        chunk_end,
        comptime!(bp.sparse),
        bp,
    );
    let key1 = own_key(
        slot0 + 8,
        start,
        count,
        list,
        list_row,
        scores,
        score_row,
        intervals,
        kv_row * k_len,
        q_len,
        k_len,
        chunk_first,
        chunk_end,
        comptime!(bp.sparse),
        bp,
    );
    sync_cube();
    let range = query_range::<E>(&tiles, start, count, chunk_first, chunk_end, bp);
    let steps = range.tiles * (group / comptime!(bp.heads));

    let rows = QueryRows::new::<E>(q, grad_out, batch, kv_head, group);
    let logit_scale = LogitScale::new(scale, softcap, bp.softcap);
    let mut dv = Vector::<f32, NO>::new(0.0f32);
    let mut dk = Vector::<f32, NO>::new(0.0f32);
    let mut dz0 = 0.0f32;
    let mut dz1 = 0.0f32;
    let mut any_broken = false;
    let log2e = comptime!(core::f32::consts::LOG2_E);

    if steps > 0 {
        let k_rows = RowAddress::of::<E>(k, batch, kv_head);
        let v_rows = RowAddress::of::<E>(v, batch, kv_head);
        let mut at = unit;
        while at < comptime!(bp.keys() * bp.chunks()) {
            let (row, col) = (at / chunks, at % chunks);
            let place = group_place(row, col, chunks);
            if start + row < count {
                let mut key = start + row;
                if comptime!(bp.sparse) {
                    key = list[list_row + row] as usize;
                }
                let from = k_rows.base + key * k_rows.stride + col;
                copy_async(&k[from..from + 1], &mut tiles.k[place..place + 1], 8u32);
                let from = v_rows.base + key * v_rows.stride + col;
                copy_async(&v[from..from + 1], &mut tiles.v[place..place + 1], 8u32);
            } else {
                tiles.k[place] = Vector::new(E::from_int(0));
                tiles.v[place] = Vector::new(E::from_int(0));
            }
            at += comptime!(bp.units());
        }
        copy_queries::<E>(
            q, grad_out, lse, delta, &rows, &range, 0usize, &mut tiles, bp,
        );
        commit_copies();

        let own = warp / 4 * comptime!(64 * bp.chunks());
        let k_panels = Panels::at::<E>(&tiles.k[own..own + 1]);
        let v_panels = Panels::at::<E>(&tiles.v[own..own + 1]);
        let q_panels = Panels::at::<E>(&tiles.q[0..1]);
        let o_panels = Panels::at::<E>(&tiles.grad_out[0..1]);
        for turn in 0..steps {
            // This unit's part of the tile has landed; behind the barrier, every unit's has, and nobody
            // needs the stage that is filled next.
            wait_copies(0u32);
            publish();
            sync_cube();
            if turn + 1 < steps {
                copy_queries::<E>(
                    q,
                    grad_out,
                    lse,
                    delta,
                    &rows,
                    &range,
                    turn + 1,
                    &mut tiles,
                    bp,
                );
            }
            commit_copies();
            let step = Step::new::<E>(turn, &range, &tiles, bp);
            let stage = turn % STAGES;
            let begin = (stage * comptime!(bp.rows * bp.chunks())) as u32;
            let q_tile = Panels {
                address: q_panels.address + begin,
            };
            let o_tile = Panels {
                address: o_panels.address + begin,
            };
            // S^T = K Q^T, and dP^T = V dO^T behind it.
            let products = multiply_two_nt::<NS>(
                &k_panels,
                &q_tile,
                &v_panels,
                &o_tile,
                comptime!(bp.element),
                comptime!(bp.rows),
                comptime!(bp.head_dim),
                64usize,
            );
            let mut p = Vector::<u32, NP>::new(0u32);
            let mut ds = Vector::<u32, NP>::new(0u32);
            #[unroll]
            for n in 0..comptime!(bp.rows / 8) {
                let mut ps = Vector::<f32, Const<4>>::new(0.0f32);
                let mut dss = Vector::<f32, Const<4>>::new(0.0f32);
                #[unroll]
                for e in 0..2usize {
                    let row = comptime!(n * 8 + e) + quad * 2;
                    let at = stage * comptime!(bp.rows) + row;
                    let reference = -tiles.lse[at] * log2e;
                    let row_delta = tiles.delta[at];
                    let x0: f32 = logit_scale.apply(
                        products.extract(comptime!(n * 4 + e)),
                        key0.score,
                        bp.softcap,
                    );
                    let x1: f32 = logit_scale.apply(
                        products.extract(comptime!(n * 4 + 2 + e)),
                        key1.score,
                        bp.softcap,
                    );
                    let dp0: f32 = products.extract(comptime!(bp.rows / 2 + n * 4 + e));
                    let dp1: f32 = products.extract(comptime!(bp.rows / 2 + n * 4 + 2 + e));
                    let mut p0 = exp_of(x0, reference);
                    let mut p1 = exp_of(x1, reference);
                    let mut ds0 = p0 * (dp0 - row_delta);
                    let mut ds1 = p1 * (dp1 - row_delta);
                    if step.boundary {
                        let mut query = (step.query + row % comptime!(bp.queries())) as i32;
                        // Such a row is no query, or selects nothing.
                        if tiles.lse[at] == f32::new(f32::NEG_INFINITY)
                            || row >= comptime!(bp.queries() * bp.heads)
                        {
                            query = -1i32;
                        }
                        let keep0 = key0.first <= query && query < key0.end;
                        let keep1 = key1.first <= query && query < key1.end;
                        p0 = select(keep0, p0, 0.0f32);
                        p1 = select(keep1, p1, 0.0f32);
                        ds0 = select(keep0, ds0, 0.0f32);
                        ds1 = select(keep1, ds1, 0.0f32);
                    }
                    dz0 += ds0;
                    dz1 += ds1;
                    if comptime!(bp.softcap) {
                        ds0 *= logit_scale.slope(x0 - key0.score, bp.softcap);
                        ds1 *= logit_scale.slope(x1 - key1.score, bp.softcap);
                    }
                    ps.insert(e, p0);
                    ps.insert(comptime!(2 + e), p1);
                    dss.insert(e, ds0);
                    dss.insert(comptime!(2 + e), ds1);
                }
                #[unroll]
                for half in 0..2usize {
                    let (x, y) = comptime!((half * 2, half * 2 + 1));
                    let at = comptime!(n * 2 + half);
                    p.insert(
                        at,
                        pack(ps.extract(x), ps.extract(y), comptime!(bp.element)),
                    );
                    ds.insert(
                        at,
                        pack(dss.extract(x), dss.extract(y), comptime!(bp.element)),
                    );
                }
            }
            if step.broken {
                // All warps have their logits: only the products with P and dS are left to this tile.
                any_broken = true;
                sync_cube();
                zero_not_finite::<E>(&mut tiles.q, stage, bp);
                zero_not_finite::<E>(&mut tiles.grad_out, stage, bp);
                publish();
                sync_cube();
            }
            dv = multiply_pv::<NO, NP>(
                dv,
                p,
                &o_tile,
                comptime!(bp.element),
                comptime!(bp.head_dim),
                comptime!(bp.rows),
            );
            dk = multiply_pv::<NO, NP>(
                dk,
                ds,
                &q_tile,
                comptime!(bp.element),
                comptime!(bp.head_dim),
                comptime!(bp.rows),
            );
        }
    }
    if key0.valid {
        let at = key0.row * comptime!(bp.head_dim / 2) + quad;
        write_row::<O, NO>(grad_v, &dv, at, 1.0f32, 0usize, bp);
        write_row::<O, NO>(grad_k, &dk, at, scale, 0usize, bp);
    }
    if key1.valid {
        let at = key1.row * comptime!(bp.head_dim / 2) + quad;
        write_row::<O, NO>(grad_v, &dv, at, 1.0f32, 1usize, bp);
        write_row::<O, NO>(grad_k, &dk, at, scale, 1usize, bp);
    }
    if comptime!(bp.sparse) {
        let dz0 = quad_sum(dz0);
        let dz1 = quad_sum(dz1);
        if quad == 0 {
            if key0.valid {
                write_score(grad_scores, key0.row, dz0, bp);
            }
            if key1.valid {
                write_score(grad_scores, key1.row, dz1, bp);
            }
        }
    }
    if any_broken {
        // What the zeroed elements of dO and Q would have added.
        let k_rows = RowAddress::of::<E>(k, batch, kv_head);
        repair_key::<E, O>(
            q,
            k,
            grad_out,
            lse,
            delta,
            &key0,
            &k_rows,
            &rows,
            group,
            &logit_scale,
            grad_v,
            true,
            bp,
        );
        repair_key::<E, O>(
            q,
            k,
            grad_out,
            lse,
            delta,
            &key0,
            &k_rows,
            &rows,
            group,
            &logit_scale,
            grad_k,
            false,
            bp,
        );
        repair_key::<E, O>(
            q,
            k,
            grad_out,
            lse,
            delta,
            &key1,
            &k_rows,
            &rows,
            group,
            &logit_scale,
            grad_v,
            true,
            bp,
        );
        repair_key::<E, O>(
            q,
            k,
            grad_out,
            lse,
            delta,
            &key1,
            &k_rows,
            &rows,
            group,
            &logit_scale,
            grad_k,
            false,
            bp,
        );
    }
}
