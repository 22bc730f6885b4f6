//! The gradients of k, v and the scores: key tiles stream the queries that attend to them.

use crate::args::Scaling;
use crate::finite::negative_infinity;
use crate::pattern::position::position;
use crate::portable::args::{Operands, OrderedSource, SavedRows};
use crate::portable::blueprint::{Blueprint, LANES};
use crate::portable::memory::{Row4, TileRows, load_rows, load_tile, store_row};
use crate::portable::product::{accumulate, accumulate_selected, products};
use crate::portable::visibility::{Pairs, PairsExpand, Slots, logit, logit_slope};
use cubecl::prelude::*;

/// One cube owns the key tile `CUBE_POS_X` of kv head `CUBE_POS_Y` of sequence `CUBE_POS_Z`: it streams,
/// for every query head of the group, the queries from the first birth to the last death among its
/// keys, and writes its keys' rows of `grad_k` and `grad_v`, and their `grad_scores`.
///
/// | buffer | layout |
/// |---|---|
/// | `q`, `grad_out`, `k`, `v` | `[batch, heads, len, head_dim]`, any strides with a contiguous last axis |
/// | `lse`, `delta` | contiguous `[batch, q_heads, q_len]` |
/// | `scores` | `[batch, kv_heads, k_len]`, any strides |
/// | `keys`, `ends`, `counts` | see [`OrderedKeys`](crate::pattern::intervals::order::OrderedKeys) |
/// | `grad_k`, `grad_v` | contiguous `[batch, kv_heads, k_len, head_dim]`, the listed keys overwritten |
/// | `grad_scores` | contiguous `[batch, kv_heads, k_len]`, the listed keys overwritten |
///
/// Without `bp.pattern.has_intervals()` every key is listed, in order; the scores, keys, ends and counts are never read
/// and `grad_scores` is never written.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dkdv_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    saved: &SavedRows<F, N>,
    source: &OrderedSource,
    grad_k: &mut Tensor<Vector<F, N>>,
    grad_v: &mut Tensor<Vector<F, N>>,
    grad_scores: &mut Tensor<f32>,
    scaling: &Scaling,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
    let (outer_rows, inner_rows) = comptime!((bp.outer_rows(), bp.inner_rows()));
    let (q_len, k_len) = (operands.q.shape(2), operands.k.shape(2));
    let (batch, kv_head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let kv_row = batch * operands.k.shape(1) + kv_head;
    let group = operands.q.shape(1) / operands.k.shape(1);
    let start = CUBE_POS_X as usize * outer_rows;
    let mut count = k_len;
    let mut list_base = 0usize;
    if comptime!(bp.pattern.has_intervals()) {
        count = source.counts[kv_row] as usize;
        list_base = kv_row * source.keys.stride(0);
    }
    if start >= count {
        terminate!();
    }

    let mut slots = Slots::new(true, bp);
    let mut not_finite = Shared::<[u32]>::new_slice(3usize);
    let mut key_scores = Shared::<[f32]>::new_slice(outer_rows);
    let mut row_lse = Shared::<[f32]>::new_slice(inner_rows);
    let mut row_delta = Shared::<[f32]>::new_slice(inner_rows);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(outer_rows * units_x));
    let mut k_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(outer_rows * bp.row_stride()), 16usize);
    let mut v_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(outer_rows * bp.row_stride()), 16usize);
    let mut q_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(inner_rows * bp.row_stride()), 16usize);
    let mut grad_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(inner_rows * bp.row_stride()), 16usize);
    let mut p_weights =
        Shared::<[Row4]>::new_aligned_slice(comptime!(outer_rows * bp.weight_stride()), 16usize);
    let mut ds_weights =
        Shared::<[Row4]>::new_aligned_slice(comptime!(outer_rows * bp.weight_stride()), 16usize);

    let mut s = Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner));
    let mut dp = Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner));
    let mut k_acc = Array::<Row4>::new(comptime!(bp.micro.outer * bp.unit_vectors()));
    let mut v_acc = Array::<Row4>::new(comptime!(bp.micro.outer * bp.unit_vectors()));
    let mut score_acc = Array::<f32>::new(comptime!(bp.micro.outer));
    #[unroll(bp.unroll())]
    for n in 0..comptime!(bp.micro.outer * bp.unit_vectors()) {
        k_acc[n] = Row4::new(0.0f32);
        v_acc[n] = Row4::new(0.0f32);
    }
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        score_acc[o] = 0.0f32;
    }

    if UNIT_POS == 0 {
        not_finite[0] = 0u32;
        not_finite[1] = 0u32;
    }
    let mut row = UNIT_POS as usize;
    while row < outer_rows {
        let n = start + row;
        // Past the end: an interval that contains no position.
        let mut first = k_len as i32;
        let mut end = 0i32;
        let mut score = 0.0f32;
        if n < count {
            end = k_len as i32;
            if comptime!(bp.pattern.has_intervals()) {
                let key = source.keys[list_base + n];
                first = key as i32;
                end = source.ends[list_base + n] as i32;
                score = source.scores[batch * source.scores.stride(0)
                    + kv_head * source.scores.stride(1)
                    + key as usize * source.scores.stride(2)];
            } else {
                first = n as i32;
            }
        }
        slots.set_key(row, first, end);
        key_scores[row] = score;
        row += comptime!(bp.units());
    }
    let k_base = batch * operands.k.stride(0) + kv_head * operands.k.stride(1);
    load_rows::<F, N>(
        &operands.k,
        k_base,
        operands.k.stride(2),
        &source.keys,
        list_base,
        start,
        count,
        &mut k_rows,
        &mut not_finite,
        2usize,
        outer_rows,
        bp.pattern.has_intervals(),
        bp,
    );
    let v_base = batch * operands.v.stride(0) + kv_head * operands.v.stride(1);
    load_rows::<F, N>(
        &operands.v,
        v_base,
        operands.v.stride(2),
        &source.keys,
        list_base,
        start,
        count,
        &mut v_rows,
        &mut not_finite,
        2usize,
        outer_rows,
        bp.pattern.has_intervals(),
        bp,
    );
    sync_cube();

    let (first_query, end_query) = slots.queries(q_len, k_len, bp);
    let mut tiles = 0usize;
    if first_query < end_query {
        tiles = (end_query - first_query).div_ceil(inner_rows);
    }
    for step in 0..tiles * group {
        let head = kv_head * group + step / tiles;
        let tile_start = first_query + step % tiles * inner_rows;
        // Two flags alternate: loading a tile sets this tile's flag while the next tile's is cleared.
        let slot = step % 2;
        sync_cube();
        let mut row = UNIT_POS as usize;
        while row < inner_rows {
            let query = tile_start + row;
            let mut at = position(query, q_len, k_len, bp.causal);
            if query < q_len {
                let n = (batch * operands.q.shape(1) + head) * q_len + query;
                row_lse[row] = saved.lse[n];
                row_delta[row] = saved.delta[n];
                // A row that attends to nothing has no gradients, whatever its logits.
                if saved.lse[n] == negative_infinity() {
                    at = i32::new(-1);
                }
            }
            slots.set_query(row, at);
            row += comptime!(bp.units());
        }
        let queries = TileRows {
            batch,
            head,
            first: tile_start,
            end: q_len,
        };
        load_tile::<F, N>(
            &operands.q,
            &queries,
            &mut q_rows,
            &mut not_finite,
            slot,
            inner_rows,
            bp,
        );
        load_tile::<F, N>(
            &saved.grad_out,
            &queries,
            &mut grad_rows,
            &mut not_finite,
            slot,
            inner_rows,
            bp,
        );
        sync_cube();
        if UNIT_POS == 0 {
            not_finite[1 - slot] = 0u32;
        }

        products(&k_rows, &q_rows, &mut s, bp);
        products(&v_rows, &grad_rows, &mut dp, bp);
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let outer = y + o * units_y;
            let mut score_sum = score_acc[o];
            #[unroll(bp.unroll())]
            for part in 0..comptime!(bp.weight_vectors()) {
                let mut p_weight = Row4::new(0.0f32);
                let mut ds_weight = Row4::new(0.0f32);
                #[unroll]
                for e in 0..LANES {
                    let n = o * comptime!(bp.micro.inner) + part * LANES + e;
                    let inner = x + (part * LANES + e) * units_x;
                    if slots.selected(outer, inner) {
                        let value = logit(s[n], scaling.scale, scaling.softcap, bp);
                        let p = (value + key_scores[outer] - row_lse[inner]).exp();
                        let ds = p * (dp[n] - row_delta[inner]);
                        score_sum += ds;
                        p_weight.insert(e, p);
                        ds_weight.insert(
                            e,
                            ds * logit_slope(value, scaling.scale, scaling.softcap, bp),
                        );
                    }
                }
                let column = x * comptime!(bp.weight_vectors()) + part;
                p_weights[outer * comptime!(bp.weight_stride()) + column] = p_weight;
                ds_weights[outer * comptime!(bp.weight_stride()) + column] = ds_weight;
            }
            score_acc[o] = score_sum;
        }
        sync_cube();

        if not_finite[slot] == 0u32 {
            accumulate(&mut v_acc, &p_weights, &grad_rows, bp);
            accumulate(&mut k_acc, &ds_weights, &q_rows, bp);
        } else {
            accumulate_selected::<Slots>(&mut v_acc, &p_weights, &grad_rows, &slots, bp);
            accumulate_selected::<Slots>(&mut k_acc, &ds_weights, &q_rows, &slots, bp);
        }
    }

    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        partial[(y + o * units_y) * units_x + x] = score_acc[o];
    }
    sync_cube();
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        let outer = y + o * units_y;
        if start + outer < count {
            let mut key = start + outer;
            if comptime!(bp.pattern.has_intervals()) {
                key = source.keys[list_base + key] as usize;
                if x == 0 {
                    let mut sum = 0.0f32;
                    for unit in 0..units_x {
                        sum += partial[outer * units_x + unit];
                    }
                    grad_scores[kv_row * k_len + key] = sum;
                }
            }
            let base = (kv_row * k_len + key) * comptime!(bp.head_dim);
            #[unroll(bp.unroll())]
            for c in 0..comptime!(bp.unit_vectors()) {
                let n = o * comptime!(bp.unit_vectors()) + c;
                store_row::<F, N>(grad_k, base, x + c * units_x, k_acc[n], bp);
                store_row::<F, N>(grad_v, base, x + c * units_x, v_acc[n], bp);
            }
        }
    }
}
