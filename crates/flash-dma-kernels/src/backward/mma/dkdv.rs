//! The gradients of k, v and the scores on tensor cores: key tiles stream the queries of a chunk.

use super::blueprint::DkdvBlueprint;
use super::keys::{own_key, query_range};
use super::mask::KeyMask;
use super::queries::{Cursor, QueryRows, Tiles, copy_step};
use super::repair::repair_key;
use super::roles::stream_queries;
use super::sums::{add_pair, add_to};
use crate::forward::mma::{LogitScale, RowAddress};
use crate::tile::mma::{Chunk, commit_copies, quad_sum, swizzle};
use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

/// One cube owns one key tile of one chunk of queries: tile `CUBE_POS_X % slots` of chunk
/// `CUBE_POS_X / slots % chunks` of kv head `CUBE_POS_X / slots / chunks`, counted over all sequences. It
/// streams the queries of the chunk that attend to its keys, of every head of the group, and holds dK,
/// dV and dz of its keys in registers, see [`roles`](super::roles).
///
/// | buffer | layout |
/// |---|---|
/// | `q`, `grad_out`, `k`, `v` | `[batch, heads, len, head_dim]`, strides and begin in steps of 16 bytes |
/// | `lse`, `delta` | contiguous `[batch, q_heads, q_len]` |
/// | `scores` | `[batch, kv_heads, k_len]`, last axis contiguous |
/// | `intervals` | contiguous `[batch, kv_heads, k_len]`, pairs of first and end |
/// | `list`, `counts` | the keys of each chunk, see [`ChunkKeys`](super::chunks::ChunkKeys) |
/// | `grad_k`, `grad_v` | contiguous `[batch, kv_heads, k_len, head_dim]`: the tile's keys are overwritten, or with `bp.shared_keys` added to; with `bp.parts` see [`KeyParts`](super::gather::KeyParts) |
/// | `grad_scores` | contiguous `[batch, kv_heads, k_len]`, likewise; sparse only |
///
/// Without `bp.sparse` the keys of every chunk are all keys in order, and the scores, intervals, list and
/// counts are never read.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn dkdv_mma_kernel<E: Float, O: Float>(
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
    let chunks = comptime!(bp.chunks());
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
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
    sync_cube();

    let range = query_range(
        &tiles.first,
        &tiles.end,
        start,
        count,
        chunk_first,
        chunk_end,
        bp,
    );
    let steps = range.tiles * (group / comptime!(bp.heads));

    let rows = QueryRows::new::<E>(q, grad_out, batch, kv_head, group);
    let size!(NS) = comptime!(bp.products().values());
    let size!(NO) = comptime!(bp.sums().values());
    let size!(NA) = comptime!(4 * bp.fragments);
    let logit_scale = LogitScale::new(scale, softcap, bp.softcap);
    let mut acc = Array::<Vector<f32, NO>>::new(comptime!(bp.head_dim / 32));
    #[unroll]
    for c in 0..comptime!(bp.head_dim / 32) {
        acc[c] = Vector::new(0.0f32);
    }
    let mut score_sums = Array::<f32>::new(comptime!(bp.fragments * 2));
    #[unroll]
    for n in 0..comptime!(bp.fragments * 2) {
        score_sums[n] = 0.0f32;
    }
    let mut any_broken = false;

    if steps > 0 {
        let k_rows = RowAddress::of::<E>(k, batch, kv_head);
        let v_rows = RowAddress::of::<E>(v, batch, kv_head);
        let mut at = unit;
        while at < comptime!(bp.keys() * bp.chunks()) {
            let (row, col) = (at / chunks, at % chunks);
            let place = swizzle(row, col, chunks);
            if start + row < count {
                let key = key_of(list, list_row, start, row, bp);
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
        copy_step::<E>(
            q,
            grad_out,
            lse,
            delta,
            &rows,
            &Cursor::first(&range),
            0usize,
            &mut tiles,
            bp,
        );
        commit_copies();
        let mut s = Array::<Vector<f32, NS>>::new(comptime!(bp.rows / 16 / bp.products().blocks));
        let mut key_scores = Array::<f32>::new(comptime!(bp.fragments * 2));
        let score_row = batch * scores.stride(0) + kv_head * scores.stride(1);
        #[unroll]
        for n in 0..comptime!(bp.fragments * 2) {
            let slot = warp % comptime!(bp.role_warps) * comptime!(bp.warp_keys())
                + comptime!(n * 8)
                + lane / 4;
            key_scores[n] = 0.0f32;
            if comptime!(bp.sparse) && start + slot < count {
                key_scores[n] = scores[score_row + key_of(list, list_row, start, slot, bp)];
            }
        }
        if warp < comptime!(bp.role_warps) {
            any_broken = stream_queries::<E, NS, NO, NA>(
                q,
                grad_out,
                lse,
                delta,
                &rows,
                &range,
                steps,
                &logit_scale,
                &key_scores,
                &mut tiles,
                &mut s,
                &mut acc,
                &mut score_sums,
                true,
                bp,
            );
        } else {
            any_broken = stream_queries::<E, NS, NO, NA>(
                q,
                grad_out,
                lse,
                delta,
                &rows,
                &range,
                steps,
                &logit_scale,
                &key_scores,
                &mut tiles,
                &mut s,
                &mut acc,
                &mut score_sums,
                false,
                bp,
            );
        }
    }

    let left = count - start;
    if warp < comptime!(bp.role_warps) {
        write_rows::<O, NO>(
            list,
            list_row,
            start,
            &acc,
            grad_v,
            1.0f32,
            kv_row * k_len,
            left,
            bp,
        );
        if any_broken {
            repair_keys::<E, O>(
                q,
                k,
                grad_out,
                lse,
                delta,
                scores,
                intervals,
                list,
                list_row,
                start,
                count,
                chunk_first,
                chunk_end,
                batch,
                kv_head,
                &rows,
                &logit_scale,
                grad_v,
                true,
                bp,
            );
        }
    } else {
        write_rows::<O, NO>(
            list,
            list_row,
            start,
            &acc,
            grad_k,
            scale,
            kv_row * k_len,
            left,
            bp,
        );
        if any_broken {
            repair_keys::<E, O>(
                q,
                k,
                grad_out,
                lse,
                delta,
                scores,
                intervals,
                list,
                list_row,
                start,
                count,
                chunk_first,
                chunk_end,
                batch,
                kv_head,
                &rows,
                &logit_scale,
                grad_k,
                false,
                bp,
            );
        }
        if comptime!(bp.sparse) {
            #[unroll]
            for n in 0..comptime!(bp.fragments * 2) {
                let sum = quad_sum(score_sums[n]);
                let slot = warp % comptime!(bp.role_warps) * comptime!(bp.warp_keys())
                    + comptime!(n * 8)
                    + lane / 4;
                if lane % 4 == 0 && slot < left {
                    let at = row_of(list, list_row, start, slot, kv_row * k_len, bp);
                    if comptime!(bp.shared_keys) {
                        add_to(&mut grad_scores[at..at + 1], sum);
                    } else {
                        grad_scores[at] = sum;
                    }
                }
            }
        }
    }
}

/// The index of the key in slot `slot` of the tile that begins at key `start` of the list's row, which is
/// at `list_row`.
#[cube]
fn key_of(
    list: &[u32],
    list_row: usize,
    start: usize,
    slot: usize,
    #[comptime] bp: DkdvBlueprint,
) -> usize {
    let mut key = start + slot;
    if comptime!(bp.sparse) {
        key = list[list_row + slot] as usize;
    }
    key
}

/// The row of the gradients of the key in slot `slot`; `first_row` is that of the head's first key.
#[cube]
fn row_of(
    list: &[u32],
    list_row: usize,
    start: usize,
    slot: usize,
    first_row: usize,
    #[comptime] bp: DkdvBlueprint,
) -> usize {
    let mut row = list_row + slot;
    if comptime!(!bp.parts) {
        row = first_row + key_of(list, list_row, start, slot, bp);
    }
    row
}

/// Writes or adds `factor` times the accumulated rows of this warp's first `left` keys.
#[cube]
fn write_rows<O: Float, NO: Size>(
    list: &[u32],
    list_row: usize,
    start: usize,
    acc: &Array<Vector<f32, NO>>,
    grad: &mut [Vector<O, Const<2>>],
    factor: f32,
    first_row: usize,
    left: usize,
    #[comptime] bp: DkdvBlueprint,
) {
    let (lane, warp) = (
        UNIT_POS_X as usize,
        UNIT_POS_Y as usize % comptime!(bp.role_warps),
    );
    #[unroll]
    for m in 0..comptime!(bp.fragments) {
        #[unroll]
        for lower in 0..2usize {
            let slot = warp * comptime!(bp.warp_keys()) + comptime!(m * 16 + lower * 8) + lane / 4;
            if slot < left {
                let row =
                    row_of(list, list_row, start, slot, first_row, bp) * comptime!(bp.head_dim / 2);
                #[unroll]
                for c in 0..comptime!(bp.chunks()) {
                    let at = row + comptime!(c * 4) + lane % 4;
                    let (index, first) = comptime!(bp.sums().place(m, c));
                    let x = acc[index].extract(comptime!(first + lower * 2)) * factor;
                    let y = acc[index].extract(comptime!(first + lower * 2 + 1)) * factor;
                    if comptime!(bp.shared_keys) {
                        add_pair::<O>(&mut grad[at..at + 1], x, y);
                    } else {
                        let mut pair = Vector::<f32, Const<2>>::new(x);
                        pair.insert(1usize, y);
                        grad[at] = Vector::cast_from(pair);
                    }
                }
            }
        }
    }
}

/// What the rows of broken steps add to the gradients of this warp's keys, once they are written: to dV in
/// the first role, to dK in the second.
#[cube]
fn repair_keys<E: Float, O: Float>(
    q: &Tensor<Chunk<E>>,
    k: &Tensor<Chunk<E>>,
    grad_out: &Tensor<Chunk<E>>,
    lse: &[f32],
    delta: &[f32],
    scores: &Tensor<f32>,
    intervals: &[Vector<u32, Const<2>>],
    list: &[u32],
    list_row: usize,
    start: usize,
    count: usize,
    chunk_first: i32,
    chunk_end: i32,
    batch: usize,
    kv_head: usize,
    rows: &QueryRows,
    logit_scale: &LogitScale,
    grad: &mut [Vector<O, Const<2>>],
    #[comptime] first_role: bool,
    #[comptime] bp: DkdvBlueprint,
) {
    let k_rows = RowAddress::of::<E>(k, batch, kv_head);
    let (kv_row, k_len) = (batch * k.shape(1) + kv_head, k.shape(2));
    let score_row = batch * scores.stride(0) + kv_head * scores.stride(1);
    for n in 0..comptime!(bp.fragments * 2) {
        let slot = UNIT_POS_Y as usize % comptime!(bp.role_warps) * comptime!(bp.warp_keys())
            + n * 8
            + UNIT_POS_X as usize / 4;
        let own = own_key(
            slot,
            start,
            count,
            list,
            list_row,
            scores,
            score_row,
            intervals,
            kv_row * k_len,
            rows.len,
            k_len,
            chunk_first,
            chunk_end,
            comptime!(bp.sparse),
            bp,
        );
        repair_key::<E, O>(
            q,
            k,
            grad_out,
            lse,
            delta,
            &own,
            &k_rows,
            rows,
            &KeyMask::none(),
            logit_scale,
            grad,
            first_role,
            bp,
        );
    }
}
