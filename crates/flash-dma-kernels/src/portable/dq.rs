//! The gradient of q: query tiles stream the keys they attend to.

use crate::args::Scaling;
use crate::finite::negative_infinity;
use crate::pattern::position::position;
use crate::portable::args::{KeySource, Operands, SavedRows};
use crate::portable::blueprint::{Blueprint, LANES};
use crate::portable::keys::TileKeys;
use crate::portable::memory::{Row4, TileRows, load_tile, store_tile};
use crate::portable::product::{accumulate, accumulate_selected, products};
use crate::portable::visibility::{Pairs, PairsExpand, Slots, logit, logit_slope};
use cubecl::prelude::*;

/// One cube owns the query tile `first_tile + CUBE_POS_X` of query head `CUBE_POS_Y` of sequence
/// `CUBE_POS_Z`, and writes its rows of `grad_q`.
///
/// | buffer | layout |
/// |---|---|
/// | `q`, `grad_out`, `k`, `v` | `[batch, heads, len, head_dim]`, any strides with a contiguous last axis |
/// | `lse`, `delta` | contiguous `[batch, q_heads, q_len]` |
/// | `scores` | `[batch, kv_heads, k_len]`, any strides |
/// | `intervals` | `[batch, kv_heads, k_len, 2]` contiguous |
/// | `list`, `counts` | key lists of the launched tiles, see [`TileKeyLists`](crate::pattern::intervals::TileKeyLists) |
/// | `grad_q` | contiguous `[batch, q_heads, q_len, head_dim]`, overwritten |
///
/// Without `bp.pattern.has_intervals()` the scores, intervals, list and counts are never read.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dq_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    saved: &SavedRows<F, N>,
    source: &KeySource,
    grad_q: &mut Tensor<Vector<F, N>>,
    scaling: &Scaling,
    first_tile: usize,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let (units_x, units_y) = comptime!((bp.micro.units_x, bp.micro.units_y));
    let (outer_rows, inner_rows) = comptime!((bp.outer_rows(), bp.inner_rows()));
    let (q_len, k_len) = (operands.q.shape(2), operands.k.shape(2));
    let (batch, head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let kv_head = head / (operands.q.shape(1) / operands.k.shape(1));
    let first_query = (first_tile + CUBE_POS_X as usize) * outer_rows;

    let mut slots = Slots::new(false, bp);
    let mut not_finite = Shared::<[u32]>::new_slice(3usize);
    let mut key_scores = Shared::<[f32]>::new_slice(inner_rows);
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
        let query = first_query + row;
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
    let keys = TileKeys::of_query_tile(
        &source.list,
        &source.counts,
        batch * operands.k.shape(1) + kv_head,
        first_query,
        q_len,
        k_len,
        bp,
    );
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

    let tiles = keys.total.div_ceil(inner_rows);
    for tile in 0..tiles {
        // Two flags alternate: loading a tile sets this tile's flag while the next tile's is cleared.
        let slot = tile % 2;
        sync_cube();
        keys.load::<F, N>(
            &operands.k,
            &operands.v,
            &source.scores,
            &source.intervals,
            &source.list,
            batch,
            kv_head,
            tile * inner_rows,
            &mut k_rows,
            &mut v_rows,
            &mut key_scores,
            &mut slots,
            &mut not_finite,
            slot,
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
                    if slots.selected(outer, inner) {
                        let value = logit(s[n], scaling.scale, scaling.softcap, bp);
                        let p = (value + key_scores[inner] - row_lse[outer]).exp();
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
            accumulate_selected::<Slots>(&mut acc, &weights, &k_rows, &slots, bp);
        }
    }

    store_tile::<F, N>(grad_q, &queries, operands.q.shape(1), &acc, bp);
}
