//! The portable forward kernel: online softmax over the key tiles that one query tile sees.

use crate::args::Scaling;
use crate::finite::negative_infinity;
use crate::pattern::position::position;
use crate::portable::args::{Operands, PlanAndBias};
use crate::portable::blueprint::Blueprint;
use crate::portable::masked::seen::{BiasRow, Seen, broadcast_row, is_active, seen_keys};
use crate::portable::memory::{Row4, TileRows, load_tile};
use crate::portable::product::products;
use crate::portable::softmax::OnlineSoftmax;
use crate::portable::visibility::{Pairs, PairsExpand, logit};
use cubecl::prelude::*;

/// One cube owns the query tile `CUBE_POS_X` of query head `CUBE_POS_Y` of sequence `CUBE_POS_Z` and writes
/// its rows of `out` and `lse`.
///
/// | buffer | layout |
/// |---|---|
/// | `q`, `k`, `v` | `[batch, heads, len, head_dim]`, any strides with a contiguous last axis |
/// | `bits`, `counts` | a tile plan, see [`PlanGeometry`](flash_dma_problem::PlanGeometry); read if `bp.pattern` is planned |
/// | `bias` | broadcasts to the logits, any strides; read if `bp.pattern` has a bias of pairs |
/// | `out` | contiguous `[batch, q_heads, q_len, head_dim]`, overwritten |
/// | `lse` | contiguous `[batch, q_heads, q_len]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    plan: &PlanAndBias,
    out: &mut Tensor<Vector<F, N>>,
    lse: &mut Tensor<f32>,
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
    let mut q_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(outer_rows * bp.row_stride()), 16usize);
    let mut k_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(inner_rows * bp.row_stride()), 16usize);
    let mut v_rows =
        Shared::<[Row4]>::new_aligned_slice(comptime!(inner_rows * bp.row_stride()), 16usize);

    let mut softmax = OnlineSoftmax::new(bp);
    if UNIT_POS == 0 {
        not_finite[0] = 0u32;
        not_finite[1] = 0u32;
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
                let query = first_query + row;
                seen.words[row] =
                    seen_keys(&plan.bits, mask_row, query, first_key, q_len, k_len, bp);
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

            products(&q_rows, &k_rows, &mut softmax.s, bp);
            #[unroll(bp.unroll())]
            for o in 0..comptime!(bp.micro.outer) {
                let outer = y + o * units_y;
                #[unroll(bp.unroll())]
                for i in 0..comptime!(bp.micro.inner) {
                    let inner = x + i * units_x;
                    let n = o * comptime!(bp.micro.inner) + i;
                    let mut value = negative_infinity();
                    if seen.selected(outer, inner) {
                        let z =
                            bias_row.read(&plan.bias, first_query + outer, first_key + inner, bp);
                        value = logit(softmax.s[n], scaling.scale, scaling.softcap, bp) + z;
                    }
                    softmax.s[n] = value;
                }
            }
            softmax.take::<Seen>(&v_rows, &seen, &not_finite, slot, bp);
            slot = 1 - slot;
        }
    }

    softmax.finish(bp);
    softmax.store::<F, N>(out, lse, &queries, q_heads, bp);
}
