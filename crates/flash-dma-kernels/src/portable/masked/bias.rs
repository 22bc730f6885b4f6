//! The portable kernel of the gradient of a bias, in its own shape.

use crate::args::Scaling;
use crate::portable::args::{Operands, PlanAndBias, SavedRows};
use crate::portable::blueprint::Blueprint;
use crate::portable::masked::dkdv::load_queries;
use crate::portable::masked::seen::{BiasRow, Seen, broadcast_row, is_active};
use crate::portable::memory::{Row4, TileRows, load_tile};
use crate::portable::product::products;
use crate::portable::visibility::{Pairs, PairsExpand, logit};
use cubecl::prelude::*;

/// One cube owns the tile of keys `CUBE_POS_X` and of queries `CUBE_POS_Y` of the bias's head `CUBE_POS_Z`, counted
/// over its sequences: every pair that reads one of its elements, in all the heads, sequences, queries and keys that
/// the bias broadcasts to, is summed in f32 in the registers of this cube, in a fixed order. It writes its elements of
/// the contiguous `grad_bias`, which has the shape of `bias`. Inputs as in
/// [`dq_kernel`](crate::portable::masked::dq::dq_kernel).
///
/// It costs two matrix products per pair more than the gradients of k and v, and needs neither atomics nor memory.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn bias_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    saved: &SavedRows<F, N>,
    plan: &PlanAndBias,
    grad_bias: &mut Tensor<f32>,
    scaling: &Scaling,
    #[comptime] whole_queries: bool,
    #[comptime] whole_keys: bool,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
    let (outer_rows, inner_rows) = comptime!((bp.outer_rows(), bp.inner_rows()));
    let (batches, q_heads, q_len, k_len) = (
        operands.q.shape(0),
        operands.q.shape(1),
        operands.q.shape(2),
        operands.k.shape(2),
    );
    let group = q_heads / operands.k.shape(1);
    let (bias_batches, bias_heads) = (plan.bias.shape(0), plan.bias.shape(1));
    let own = CUBE_POS_Z as usize;
    let (own_head, own_batch) = (own % bias_heads, own / bias_heads);
    let heads_each = q_heads / bias_heads;
    let batches_each = batches / bias_batches;

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
    let mut sums = Shared::<[f32]>::new_slice(comptime!(outer_rows * inner_rows));
    let mut s = Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner));
    let mut dp = Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner));
    let mut acc = Array::<f32>::new(comptime!(bp.micro.outer * bp.micro.inner));
    #[unroll(bp.unroll())]
    for n in 0..comptime!(bp.micro.outer * bp.micro.inner) {
        acc[n] = 0.0f32;
    }

    // All tiles along an axis that the bias broadcasts, otherwise the cube's own.
    let mut first_key_tile = CUBE_POS_X as usize;
    let mut key_tiles = 1usize;
    if comptime!(whole_keys) {
        first_key_tile = 0usize;
        key_tiles = k_len.div_ceil(outer_rows);
    }
    let mut first_query_tile = CUBE_POS_Y as usize;
    let mut query_tiles = 1usize;
    if comptime!(whole_queries) {
        first_query_tile = 0usize;
        query_tiles = q_len.div_ceil(inner_rows);
    }
    for step in 0..batches_each * heads_each * key_tiles {
        let batch = own_batch + step / key_tiles / heads_each;
        let head = own_head * heads_each + step / key_tiles % heads_each;
        let first_key = (first_key_tile + step % key_tiles) * outer_rows;
        let kv_head = head / group;
        let bias_row = BiasRow::new(&plan.bias, batch, head, q_heads, bp);
        let mut mask_row = 0usize;
        if comptime!(bp.pattern.is_planned()) {
            mask_row = broadcast_row(plan.bits.shape(0), plan.bits.shape(1), batch, head, q_heads);
        }
        sync_cube();
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
        for tile in first_query_tile..first_query_tile + query_tiles {
            let first_query = tile * inner_rows;
            let end_query = min(first_query + inner_rows, q_len);
            if is_active(
                &plan.counts,
                mask_row,
                first_query,
                end_query,
                first_key,
                bp,
            ) {
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
                    2usize,
                    bp,
                );
                sync_cube();
                products(&k_rows, &q_rows, &mut s, bp);
                products(&v_rows, &grad_rows, &mut dp, bp);
                #[unroll(bp.unroll())]
                for o in 0..comptime!(bp.micro.outer) {
                    let outer = y + o * units_y;
                    #[unroll(bp.unroll())]
                    for i in 0..comptime!(bp.micro.inner) {
                        let inner = x + i * units_x;
                        let n = o * comptime!(bp.micro.inner) + i;
                        if seen.selected(outer, inner) {
                            let z = bias_row.read(
                                &plan.bias,
                                first_query + inner,
                                first_key + outer,
                                bp,
                            );
                            let value = logit(s[n], scaling.scale, scaling.softcap, bp);
                            let p = (value + z - row_lse[inner]).exp();
                            acc[n] += p * (dp[n] - row_delta[inner]);
                        }
                    }
                }
            }
        }
    }

    #[unroll(bp.unroll())]
    for o in 0..comptime!(bp.micro.outer) {
        #[unroll(bp.unroll())]
        for i in 0..comptime!(bp.micro.inner) {
            let at = (y + o * units_y) * inner_rows + x + i * units_x;
            sums[at] = acc[o * comptime!(bp.micro.inner) + i];
        }
    }
    sync_cube();
    // One unit per element sums along the axes that the bias broadcasts.
    let keys_added = comptime!(if whole_keys { outer_rows } else { 1usize });
    let queries_added = comptime!(if whole_queries { inner_rows } else { 1usize });
    let mut item = UNIT_POS as usize;
    while item < comptime!(outer_rows * inner_rows / keys_added / queries_added) {
        // Neighbouring units write neighbouring keys.
        let key = item % comptime!(outer_rows / keys_added);
        let query = item / comptime!(outer_rows / keys_added);
        let mut sum = 0.0f32;
        for i in 0..queries_added {
            for o in 0..keys_added {
                sum += sums[(key + o) * inner_rows + query + i];
            }
        }
        let to_key = first_key_tile * outer_rows + key;
        let to_query = first_query_tile * inner_rows + query;
        if to_key < plan.bias.shape(3) && to_query < plan.bias.shape(2) {
            grad_bias[(own * plan.bias.shape(2) + to_query) * plan.bias.shape(3) + to_key] = sum;
        }
        item += comptime!(bp.units());
    }
}
