//! The portable kernel of the gradient of q: query tiles stream the key tiles they see.

use crate::args::Scaling;
use crate::finite::negative_infinity;
use crate::pattern::position::position;
use crate::portable::args::{Operands, PlanAndBias, SavedRows};
use crate::portable::blueprint::{Blueprint, LANES};
use crate::portable::masked::seen::{BiasRow, Seen, broadcast_row, is_active, seen_keys};
use crate::portable::memory::{Row4, TileRows, load_tile, store_tile};
use crate::portable::product::{accumulate, accumulate_selected, products};
use crate::portable::visibility::{Pairs, PairsExpand, logit, logit_slope};
use cubecl::prelude::*;

/// One cube owns the query tile `CUBE_POS_X` of query head `CUBE_POS_Y` of sequence `CUBE_POS_Z`, and writes its rows
/// of the contiguous `grad_q`. Inputs as in [`forward_kernel`](crate::portable::masked::forward::forward_kernel);
/// `grad_out` as `q`; `lse` and `delta` contiguous `[batch, q_heads, q_len]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dq_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    saved: &SavedRows<F, N>,
    plan: &PlanAndBias,
    grad_q: &mut Tensor<Vector<F, N>>,
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
    let (batch, head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let kv_head = head / (q_heads / operands.k.shape(1));
    let first_query = CUBE_POS_X as usize * outer_rows;
    let end_query = min(first_query + outer_rows, q_len);
    let mut mask_row = 0usize;
    if comptime!(bp.pattern.is_planned()) {
        mask_row = broadcast_row(plan.bits.shape(0), plan.bits.shape(1), batch, head, q_heads);
    }
    let bias_row = BiasRow::new(&plan.bias, batch, head, q_heads, bp);

    let mut seen = Seen::new(outer_rows, false);
    let mut not_finite = Shared::<[u32]>::new_slice(3usize);
    let mut row_lse = Shared::<[f32]>::new_slice(outer_rows);
    let mut row_delta = Shared::<[f32]>::new_slice(outer_rows);
    let mut q_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(outer_rows * bp.row_stride()), 16usize);
    let mut grad_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(outer_rows * bp.row_stride()), 16usize);
    let mut k_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(inner_rows * bp.row_stride()), 16usize);
    let mut v_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(inner_rows * bp.row_stride()), 16usize);
    let mut weights =
        Shared::<[Row4]>::new_aligned_slice(comptime!(outer_rows * bp.weight_stride()), 16usize);

    let mut s = Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner));
    let mut dp = Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner));
    let mut acc = Array::<Row4>::new(comptime!(bp.micro.outer * bp.unit_vectors()));
    #[unroll(bp.unroll())]
    for n in 0..comptime!(bp.micro.outer * bp.unit_vectors()) {
        acc[n] = Row4::new(0.0f32);
    }
    if UNIT_POS == 0 {
        not_finite[0] = 0u32;
        not_finite[1] = 0u32;
    }
    let mut row = UNIT_POS as usize;
    while row < outer_rows {
        // A row that sees nothing has no gradients, regardless of its logits.
        row_lse[row] = negative_infinity();
        if first_query + row < q_len {
            let n = (batch * q_heads + head) * q_len + first_query + row;
            row_lse[row] = saved.lse[n];
            row_delta[row] = saved.delta[n];
        }
        row += comptime!(bp.units());
    }
    let queries = TileRows {
        batch,
        head,
        first: first_query,
        end: q_len,
    };
    load_tile::<F, N>(
        &operands.q,
        &queries,
        &mut q_rows,
        &mut not_finite,
        2usize,
        outer_rows,
        bp,
    );
    load_tile::<F, N>(
        &saved.grad_out,
        &queries,
        &mut grad_rows,
        &mut not_finite,
        2usize,
        outer_rows,
        bp,
    );
    sync_cube();

    let total = max(position(end_query - 1, q_len, k_len, bp.causal) + 1, 0i32) as usize;
    // Two flags alternate: loading a tile sets one while the other is cleared.
    let mut slot = 0usize;
    for tile in 0..total.div_ceil(inner_rows) {
        let first_key = tile * inner_rows;
        if is_active(
            &plan.counts,
            mask_row,
            first_query,
            end_query,
            first_key,
            bp,
        ) {
            sync_cube();
            let mut row = UNIT_POS as usize;
            while row < outer_rows {
                let mut word = 0u32;
                // Tested by `==`, which behaves the same on every runtime if the LSE is NaN.
                let sees_nothing = row_lse[row] == negative_infinity();
                if !sees_nothing {
                    word = seen_keys(
                        &plan.bits,
                        mask_row,
                        first_query + row,
                        first_key,
                        q_len,
                        k_len,
                        bp,
                    );
                }
                seen.words[row] = word;
                row += comptime!(bp.units());
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
                slot,
                inner_rows,
                bp,
            );
            load_tile::<F, N>(
                &operands.v,
                &keys,
                &mut v_rows,
                &mut not_finite,
                slot,
                inner_rows,
                bp,
            );
            sync_cube();
            if UNIT_POS == 0 {
                not_finite[1 - slot] = 0u32;
            }

            products(&q_rows, &k_rows, &mut s, bp);
            products(&grad_rows, &v_rows, &mut dp, bp);
            #[unroll(bp.unroll())]
            for o in 0..comptime!(bp.micro.outer) {
                let outer = y + o * units_y;
                #[unroll(bp.unroll())]
                for part in 0..comptime!(bp.weight_vectors()) {
                    let mut weight = Row4::new(0.0f32);
                    #[unroll]
                    for e in 0..LANES {
                        let n = o * comptime!(bp.micro.inner) + part * LANES + e;
                        let inner = x + (part * LANES + e) * units_x;
                        if seen.selected(outer, inner) {
                            let z = bias_row.read(
                                &plan.bias,
                                first_query + outer,
                                first_key + inner,
                                bp,
                            );
                            let value = logit(s[n], scaling.scale, scaling.softcap, bp);
                            let p = (value + z - row_lse[outer]).exp();
                            let ds = p * (dp[n] - row_delta[outer]);
                            weight.insert(
                                e,
                                ds * logit_slope(value, scaling.scale, scaling.softcap, bp),
                            );
                        }
                    }
                    let column = x * comptime!(bp.weight_vectors()) + part;
                    weights[outer * comptime!(bp.weight_stride()) + column] = weight;
                }
            }
            sync_cube();

            if not_finite[slot] == 0u32 {
                accumulate(&mut acc, &weights, &k_rows, bp);
            } else {
                accumulate_selected::<Seen>(&mut acc, &weights, &k_rows, &seen, bp);
            }
            slot = 1 - slot;
        }
    }

    store_tile::<F, N>(grad_q, &queries, q_heads, &acc, bp);
}
