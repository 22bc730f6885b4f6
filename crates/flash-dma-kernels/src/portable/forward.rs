//! The forward kernel: online softmax over the key tiles of one query tile.

use crate::args::Scaling;
use crate::pattern::position::position;
use crate::portable::args::{KeySource, Operands};
use crate::portable::blueprint::Blueprint;
use crate::portable::keys::TileKeys;
use crate::portable::memory::{Row4, TileRows, load_tile};
use crate::portable::softmax::OnlineSoftmax;
use crate::portable::visibility::Slots;
use cubecl::prelude::*;

/// One cube owns the query tile `first_tile + CUBE_POS_X` of query head `CUBE_POS_Y` of sequence
/// `CUBE_POS_Z`: it streams the keys that the tile attends to and writes its rows of `out` and `lse`.
///
/// | buffer | layout |
/// |---|---|
/// | `q`, `k`, `v` | `[batch, heads, len, head_dim]`, any strides with a contiguous last axis |
/// | `scores` | `[batch, kv_heads, k_len]`, any strides |
/// | `intervals` | `[batch, kv_heads, k_len, 2]` contiguous |
/// | `list`, `counts` | key lists of the launched tiles, see [`TileKeyLists`](crate::pattern::intervals::TileKeyLists) |
/// | `out` | contiguous `[batch, q_heads, q_len, head_dim]`, overwritten |
/// | `lse` | contiguous `[batch, q_heads, q_len]`, overwritten |
///
/// Without `bp.pattern.has_intervals()` the scores, intervals, list and counts are never read.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_kernel<F: Float, N: Size>(
    operands: &Operands<F, N>,
    source: &KeySource,
    out: &mut Tensor<Vector<F, N>>,
    lse: &mut Tensor<f32>,
    scaling: &Scaling,
    first_tile: usize,
    #[comptime] bp: Blueprint,
    #[define(F)] _element: ElemType,
) {
    let (outer_rows, inner_rows) = comptime!((bp.outer_rows(), bp.inner_rows()));
    let (q_len, k_len) = (operands.q.shape(2), operands.k.shape(2));
    let (batch, head) = (CUBE_POS_Z as usize, CUBE_POS_Y as usize);
    let kv_head = head / (operands.q.shape(1) / operands.k.shape(1));
    let first_query = (first_tile + CUBE_POS_X as usize) * outer_rows;

    let mut slots = Slots::new(false, bp);
    let mut not_finite = Shared::<[u32]>::new_slice(3usize);
    let mut key_scores = Shared::<[f32]>::new_slice(inner_rows);
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
    let mut row = UNIT_POS as usize;
    while row < outer_rows {
        slots.set_query(row, position(first_query + row, q_len, k_len, bp.causal));
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

        softmax.attend(
            &q_rows,
            &k_rows,
            &v_rows,
            &key_scores,
            &slots,
            &not_finite,
            slot,
            scaling.scale,
            scaling.softcap,
            bp,
        );
    }

    softmax.finish(bp);
    softmax.store::<F, N>(out, lse, &queries, operands.q.shape(1), bp);
}
