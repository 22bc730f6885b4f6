//! The portable kernel of the gradients of k and v: key tiles stream the query tiles that see them.

use crate::args::Scaling;
use crate::finite::negative_infinity;
use crate::portable::args::{Operands, PlanAndBias, SavedRows};
use crate::portable::blueprint::{Blueprint, LANES};
use crate::portable::masked::seen::{BiasRow, Seen, broadcast_row, is_active, seen_keys};
use crate::portable::memory::{Row4, TileRows, load_tile, store_tile};
use crate::portable::product::{accumulate, accumulate_selected, products};
use crate::portable::visibility::{Pairs, PairsExpand, logit, logit_slope};
use cubecl::prelude::*;

/// One cube owns the key tile `CUBE_POS_X` of kv head `CUBE_POS_Y` of sequence `CUBE_POS_Z`: it streams the queries of
/// every head of the group and writes its rows of the contiguous `grad_k` and `grad_v`. Inputs as in
/// [`dq_kernel`](crate::portable::masked::dq::dq_kernel).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dkdv_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    saved: &SavedRows<F, N>,
    plan: &PlanAndBias,
    grad_k: &mut Tensor<Vector<F, N>>,
    grad_v: &mut Tensor<Vector<F, N>>,
    scaling: &Scaling,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
    let (outer_rows, inner_rows) = comptime!((bp.outer_rows(), bp.inner_rows()));
    let (q_heads, q_len, k_len) = (
        operands.q.shape(1),
        operands.q.shape(2),
        operands.k.shape(2),
    );
    let (batch, kv_head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let group = q_heads / operands.k.shape(1);
    let first_key = CUBE_POS_X as usize * outer_rows;

    let mut seen = Seen::new(inner_rows, true);
    let mut not_finite = Shared::<[u32]>::new_slice(3usize);
    let mut row_lse = Shared::<[f32]>::new_slice(inner_rows);
    let mut row_delta = Shared::<[f32]>::new_slice(inner_rows);
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
    #[unroll(bp.unroll())]
    for n in 0..comptime!(bp.micro.outer * bp.unit_vectors()) {
        k_acc[n] = Row4::new(0.0f32);
        v_acc[n] = Row4::new(0.0f32);
    }
    if UNIT_POS == 0 {
        not_finite[0] = 0u32;
        not_finite[1] = 0u32;
    }
    let keys = TileRows {
        batch,
        head: kv_head,
        first: first_key,
        end: k_len,
    };
    load_tile::<F, N>(
        &operands.k,
        &keys,
        &mut k_rows,
        &mut not_finite,
        2usize,
        outer_rows,
        bp,
    );
    load_tile::<F, N>(
        &operands.v,
        &keys,
        &mut v_rows,
        &mut not_finite,
        2usize,
        outer_rows,
        bp,
    );
    sync_cube();

    let tiles = q_len.div_ceil(inner_rows);
    let first_tile = first_visible_tile(first_key, q_len, k_len, inner_rows, bp.causal);
    // Two flags alternate: loading a tile sets one while the other is cleared.
    let mut slot = 0usize;
    for step in 0..(tiles - first_tile) * group {
        let head = kv_head * group + step / (tiles - first_tile);
        let first_query = (first_tile + step % (tiles - first_tile)) * inner_rows;
        let end_query = min(first_query + inner_rows, q_len);
        let mut mask_row = 0usize;
        if comptime!(bp.pattern.is_planned()) {
            mask_row = broadcast_row(plan.bits.shape(0), plan.bits.shape(1), batch, head, q_heads);
        }
        if is_active(
            &plan.counts,
            mask_row,
            first_query,
            end_query,
            first_key,
            bp,
        ) {
            let bias_row = BiasRow::new(&plan.bias, batch, head, q_heads, bp);
            sync_cube();
            load_queries::<F, N>(
                &operands.q,
                &saved.grad_out,
                &saved.lse,
                &saved.delta,
                &plan.bits,
                batch,
                head,
                mask_row,
                first_query,
                first_key,
                k_len,
                &mut q_rows,
                &mut grad_rows,
                &mut row_lse,
                &mut row_delta,
                &mut seen,
                &mut not_finite,
                slot,
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
                #[unroll(bp.unroll())]
                for part in 0..comptime!(bp.weight_vectors()) {
                    let mut p_weight = Row4::new(0.0f32);
                    let mut ds_weight = Row4::new(0.0f32);
                    #[unroll]
                    for e in 0..LANES {
                        let n = o * comptime!(bp.micro.inner) + part * LANES + e;
                        let inner = x + (part * LANES + e) * units_x;
                        if seen.selected(outer, inner) {
                            let z = bias_row.read(
                                &plan.bias,
                                first_query + inner,
                                first_key + outer,
                                bp,
                            );
                            let value = logit(s[n], scaling.scale, scaling.softcap, bp);
                            let p = (value + z - row_lse[inner]).exp();
                            let ds = p * (dp[n] - row_delta[inner]);
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
            }
            sync_cube();

            if not_finite[slot] == 0u32 {
                accumulate(&mut v_acc, &p_weights, &grad_rows, bp);
                accumulate(&mut k_acc, &ds_weights, &q_rows, bp);
            } else {
                accumulate_selected::<Seen>(&mut v_acc, &p_weights, &grad_rows, &seen, bp);
                accumulate_selected::<Seen>(&mut k_acc, &ds_weights, &q_rows, &seen, bp);
            }
            slot = 1 - slot;
        }
    }

    store_tile::<F, N>(grad_k, &keys, operands.k.shape(1), &k_acc, bp);
    store_tile::<F, N>(grad_v, &keys, operands.k.shape(1), &v_acc, bp);
}

/// The first tile of queries that causal masking lets see key `first_key`; at most their number.
#[cube]
pub(crate) fn first_visible_tile(
    first_key: usize,
    q_len: usize,
    k_len: usize,
    rows: usize,
    #[comptime] causal: bool,
) -> usize {
    let mut query = 0usize;
    if comptime!(causal) {
        query = max(first_key as i32 + q_len as i32 - k_len as i32, 0i32) as usize;
    }
    min(query / rows, q_len.div_ceil(rows))
}

/// Loads a tile of queries, their gradients, and what they see of the keys from `first_key` on: an inner tile of
/// key-outer kernels. All units cooperate; the caller synchronises.
#[cube]
pub(crate) fn load_queries<F: Float, N: Size>(
    q: &Tensor<Vector<F, N>>,
    grad_out: &Tensor<Vector<F, N>>,
    lse: &Tensor<f32>,
    delta: &Tensor<f32>,
    bits: &Tensor<u32>,
    batch: usize,
    head: usize,
    mask_row: usize,
    first_query: usize,
    first_key: usize,
    k_len: usize,
    q_rows: &mut Shared<[Row4]>,
    grad_rows: &mut Shared<[Row4]>,
    row_lse: &mut Shared<[f32]>,
    row_delta: &mut Shared<[f32]>,
    seen: &mut Seen,
    not_finite: &mut Shared<[u32]>,
    slot: usize,
    #[comptime] bp: Blueprint,
) {
    let rows = comptime!(bp.inner_rows());
    let q_len = q.shape(2);
    let mut row = UNIT_POS as usize;
    while row < rows {
        let query = first_query + row;
        let mut word = 0u32;
        if query < q_len {
            let n = (batch * q.shape(1) + head) * q_len + query;
            row_lse[row] = lse[n];
            row_delta[row] = delta[n];
            // A row that sees nothing has no gradients, regardless of its logits.
            let sees_nothing = lse[n] == negative_infinity();
            if !sees_nothing {
                word = seen_keys(bits, mask_row, query, first_key, q_len, k_len, bp);
            }
        }
        seen.words[row] = word;
        row += comptime!(bp.units());
    }
    let queries = TileRows {
        batch,
        head,
        first: first_query,
        end: q_len,
    };
    load_tile::<F, N>(q, &queries, q_rows, not_finite, slot, rows, bp);
    load_tile::<F, N>(grad_out, &queries, grad_rows, not_finite, slot, rows, bp);
}
