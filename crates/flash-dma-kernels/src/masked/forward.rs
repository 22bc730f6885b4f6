//! The portable forward kernel: online softmax over the key tiles that one query tile sees.

use super::seen::{BiasRow, accumulate_seen, broadcast_row, is_active, seen_keys, sees};
use crate::tile::{
    Blueprint, LANES, Row4, accumulate, load_rows, logit, position, products, store_row,
};
use cubecl::prelude::*;

/// One cube owns the query tile `CUBE_POS_X` of query head `CUBE_POS_Y` of sequence `CUBE_POS_Z` and writes
/// its rows of `out` and `lse`.
///
/// | buffer | layout |
/// |---|---|
/// | `q`, `k`, `v` | `[batch, heads, len, head_dim]`, any strides with a contiguous last axis |
/// | `bits`, `counts` | a tile plan, see [`PlanGeometry`](flash_dma_problem::PlanGeometry); read if `masked` |
/// | `bias` | broadcasts to the logits, any strides; read if `biased` |
/// | `out` | contiguous `[batch, q_heads, q_len, head_dim]`, overwritten |
/// | `lse` | contiguous `[batch, q_heads, q_len]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn forward_kernel<F: Float, N: Size>(
    q: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    v: &Tensor<Vector<F, N>>,
    bits: &Tensor<u32>,
    counts: &Tensor<u32>,
    bias: &Tensor<f32>,
    out: &mut Tensor<Vector<F, N>>,
    lse: &mut Tensor<f32>,
    scale: f32,
    softcap: f32,
    #[comptime] masked: bool,
    #[comptime] biased: bool,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
    let (outer_rows, inner_rows) = comptime!((bp.outer_rows(), bp.inner_rows()));
    let (q_heads, q_len, k_len) = (q.shape(1), q.shape(2), k.shape(2));
    let (batch, head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let kv_head = head / (q_heads / k.shape(1));
    let first_query = CUBE_POS_X as usize * outer_rows;
    let end_query = min(first_query + outer_rows, q_len);
    let mut mask_row = 0usize;
    if comptime!(masked) {
        mask_row = broadcast_row(bits.shape(0), bits.shape(1), batch, head, q_heads);
    }
    let bias_row = BiasRow::new(bias, batch, head, q_heads, biased);

    let mut seen = Shared::<[u32]>::new_slice(outer_rows);
    let mut not_finite = Shared::<[u32]>::new_slice(3usize);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(outer_rows * units_x));
    let mut q_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(outer_rows * bp.row_stride()), 16usize);
    let mut k_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(inner_rows * bp.row_stride()), 16usize);
    let mut v_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(inner_rows * bp.row_stride()), 16usize);
    let mut weights =
        Shared::<[Row4]>::new_aligned_slice(comptime!(outer_rows * bp.weight_stride()), 16usize);

    // Registers: products, then probabilities; accumulated output; maximum and partial sum a row.
    let mut s = Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner));
    let mut acc = Array::<Row4>::new(comptime!(bp.micro.outer * bp.unit_vectors()));
    let mut row_max = Array::<f32>::new(comptime!(bp.micro.outer));
    let mut row_sum = Array::<f32>::new(comptime!(bp.micro.outer));
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        row_max[o] = f32::new(f32::NEG_INFINITY);
        row_sum[o] = 0.0f32;
    }
    #[unroll(bp.unroll())]
    for n in 0..comptime!(bp.micro.outer * bp.unit_vectors()) {
        acc[n] = Row4::new(0.0f32);
    }
    if UNIT_POS == 0 {
        not_finite[0] = 0u32;
        not_finite[1] = 0u32;
    }
    let q_base = batch * q.stride(0) + head * q.stride(1);
    load_rows::<F, N>(
        q,
        q_base,
        q.stride(2),
        bits,
        0usize,
        first_query,
        q_len,
        &mut q_rows,
        &mut not_finite,
        2usize,
        outer_rows,
        false,
        bp,
    );

    let total = max(position(end_query - 1, q_len, k_len, bp.causal) + 1, 0i32) as usize;
    // Two flags take turns: one is set by the load of a tile, the other cleared meanwhile.
    let mut slot = 0usize;
    for tile in 0..total.div_ceil(inner_rows) {
        let first_key = tile * inner_rows;
        if is_active(counts, mask_row, first_query, end_query, first_key, masked) {
            sync_cube();
            let mut row = UNIT_POS as usize;
            while row < outer_rows {
                let query = first_query + row;
                seen[row] = seen_keys(
                    bits, mask_row, query, first_key, q_len, k_len, masked, bp.causal,
                );
                row += comptime!(bp.units());
            }
            load_rows::<F, N>(
                k,
                batch * k.stride(0) + kv_head * k.stride(1),
                k.stride(2),
                bits,
                0usize,
                first_key,
                k_len,
                &mut k_rows,
                &mut not_finite,
                slot,
                inner_rows,
                false,
                bp,
            );
            load_rows::<F, N>(
                v,
                batch * v.stride(0) + kv_head * v.stride(1),
                v.stride(2),
                bits,
                0usize,
                first_key,
                k_len,
                &mut v_rows,
                &mut not_finite,
                slot,
                inner_rows,
                false,
                bp,
            );
            sync_cube();
            if UNIT_POS == 0 {
                not_finite[1 - slot] = 0u32;
            }

            products(&q_rows, &k_rows, &mut s, bp);
            #[unroll(bp.unroll())]
            for o in 0..comptime!(bp.micro.outer) {
                let outer = y + o * units_y;
                let mut unit_max = f32::new(f32::NEG_INFINITY);
                #[unroll(bp.unroll())]
                for i in 0..comptime!(bp.micro.inner) {
                    let inner = x + i * units_x;
                    let n = o * comptime!(bp.micro.inner) + i;
                    let mut value = f32::new(f32::NEG_INFINITY);
                    if sees(&seen, outer, inner, false) {
                        let z = bias_row.read(bias, first_query + outer, first_key + inner, biased);
                        value = logit(s[n], scale, softcap, bp) + z;
                    }
                    s[n] = value;
                    unit_max = max(unit_max, value);
                }
                partial[outer * units_x + x] = unit_max;
            }
            sync_cube();

            #[unroll(bp.unroll())]
            for o in 0..comptime!(bp.micro.outer) {
                let outer = y + o * units_y;
                let old_max = row_max[o];
                let mut new_max = old_max;
                for unit in 0..units_x {
                    new_max = max(new_max, partial[outer * units_x + unit]);
                }
                row_max[o] = new_max;
                // While a row has seen no finite logit, -inf - -inf would make NaN.
                let mut shift = new_max;
                if new_max == f32::new(f32::NEG_INFINITY) {
                    shift = 0.0f32;
                }
                let rescale = (old_max - shift).exp();
                let mut sum = row_sum[o] * rescale;
                #[unroll(bp.unroll())]
                for part in 0..comptime!(bp.weight_vectors()) {
                    let mut weight = Row4::new(0.0f32);
                    #[unroll]
                    for e in 0..LANES {
                        let n = o * comptime!(bp.micro.inner) + part * LANES + e;
                        let p = (s[n] - shift).exp();
                        sum += p;
                        weight.insert(e, p);
                    }
                    let column = x * comptime!(bp.weight_vectors()) + part;
                    weights[outer * comptime!(bp.weight_stride()) + column] = weight;
                }
                row_sum[o] = sum;
                #[unroll(bp.unroll())]
                for c in 0..comptime!(bp.unit_vectors()) {
                    let n = o * comptime!(bp.unit_vectors()) + c;
                    acc[n] *= Row4::new(rescale);
                }
            }
            sync_cube();

            if not_finite[slot] == 0u32 {
                accumulate(&mut acc, &weights, &v_rows, bp);
            } else {
                accumulate_seen(&mut acc, &weights, &v_rows, &seen, false, bp);
            }
            slot = 1 - slot;
        }
    }

    // The maxima are not read any more once the last tile's weights are written.
    sync_cube();
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        partial[(y + o * units_y) * units_x + x] = row_sum[o];
    }
    sync_cube();
    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        let outer = y + o * units_y;
        let query = first_query + outer;
        if query < q_len {
            let mut sum = 0.0f32;
            for unit in 0..units_x {
                sum += partial[outer * units_x + unit];
            }
            let mut row_lse = row_max[o] + sum.ln();
            if sum == 0.0f32 {
                row_lse = f32::new(f32::NEG_INFINITY);
            }
            let base = batch * out.stride(0) + head * out.stride(1) + query * out.stride(2);
            #[unroll(bp.unroll())]
            for c in 0..comptime!(bp.unit_vectors()) {
                let n = o * comptime!(bp.unit_vectors()) + c;
                let mut value = Row4::new(0.0f32);
                if sum != 0.0f32 {
                    value = acc[n] * Row4::new(1.0f32 / sum);
                }
                store_row::<F, N>(out, base, x + c * units_x, value, bp);
            }
            if x == 0 {
                lse[(batch * q_heads + head) * q_len + query] = row_lse;
            }
        }
    }
}
