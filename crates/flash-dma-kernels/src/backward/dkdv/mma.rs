//! The gradients of k, v and the scores on tensor cores: key tiles stream the queries of a chunk.

pub(crate) mod output;
pub(crate) mod roles;
pub(crate) mod weights;

use crate::args::Scaling;
use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::mma::output::{
    BiasKeys, key_of, repair_keys, row_of, slot_of, write_rows,
};
use crate::backward::dkdv::mma::roles::stream_queries;
use crate::backward::dkdv::shared::args::{BackwardInputs, KeyGradients, KeyGrid, KeyTileSource};
use crate::backward::dkdv::shared::keys::{ChunkTile, own_key, query_range, score_row};
use crate::backward::dkdv::shared::mask::{KeyMask, StepList};
use crate::backward::dkdv::shared::queries::{Cursor, QueryRows, Range, Tiles, copy_step};
use crate::backward::dkdv::shared::sums::add_to;
use crate::matrix::fragment::{quad_sum, swizzle};
use crate::matrix::logits::LogitScale;
use crate::matrix::ptx::commit_copies;
use crate::matrix::stages::RowAddress;
use cubecl::prelude::barrier::copy_async;
use cubecl::prelude::*;

/// One cube owns one key tile of one chunk of queries: tile `CUBE_POS_X % slots` of chunk `CUBE_POS_X / slots % chunks`
/// of kv head `CUBE_POS_X / slots / chunks`, counted over all sequences. It streams the queries of the chunk that
/// attend to its keys, of every head of the group, and holds dK, dV and dz of its keys in registers; see [`roles`].
///
/// | buffer | layout |
/// |---|---|
/// | `inputs.q`, `inputs.grad_out`, `k`, `v` | `[batch, heads, len, head_dim]`, strides and begin in steps of 16 bytes |
/// | `inputs.lse`, `inputs.delta` | contiguous `[batch, q_heads, q_len]` |
/// | `source.scores` | `[batch, kv_heads, k_len]`, last axis contiguous |
/// | `source.intervals` | contiguous `[batch, kv_heads, k_len]`, pairs of first and end |
/// | `source.list`, `source.counts` | the keys of each chunk, see [`ChunkKeys`](crate::pattern::intervals::chunks::ChunkKeys) |
/// | `grads.k`, `grads.v` | contiguous `[batch, kv_heads, k_len, head_dim]`: the tile's keys are overwritten, or with `bp.shared_keys` added to; with `bp.parts` see [`KeyParts`](crate::backward::dkdv::shared::gather::KeyParts) |
/// | `grads.scores` | contiguous `[batch, kv_heads, k_len]`, likewise; sparse only |
///
/// Without `bp.pattern.has_intervals()` every chunk has all keys in order, and the scores, intervals, list and counts
/// are never read; with `bp.pattern.is_planned()` or `bp.pattern.has_key_bias()` they have the meaning described in
/// [`mask`](crate::backward::dkdv::shared::mask).
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dkdv_mma_kernel<E: Float, O: Float>(
    inputs: &BackwardInputs<E>,
    source: &KeyTileSource,
    grads: &mut KeyGradients<O>,
    scaling: &Scaling,
    grid: &KeyGrid,
    #[comptime] bp: DkdvBlueprint,
    #[define(E)] _element: ElemType,
    #[define(O)] _output: ElemType,
) {
    let chunks = comptime!(bp.chunks());
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let unit = UNIT_POS as usize;
    let (q_heads, q_len) = (inputs.q.shape(1), inputs.q.shape(2));
    let (kv_heads, k_len) = (inputs.k.shape(1), inputs.k.shape(2));
    let group = q_heads / kv_heads;

    let place = ChunkTile::of_cube(source, grid, kv_heads, q_len, k_len, bp);
    let (batch, kv_head, kv_row) = (place.batch, place.kv_head, place.kv_row);
    let (start, count, list_row) = (place.start, place.count, place.list_row);

    let mut tiles = Tiles::<E>::new(bp);
    if comptime!(!bp.pattern.is_planned()) && unit < comptime!(bp.keys()) {
        let own = own_key(unit, &place, source, 0usize, false, bp);
        tiles.first[unit] = own.first;
        tiles.end[unit] = own.end;
    }
    sync_cube();

    let range = if comptime!(bp.pattern.is_planned()) {
        Range::none()
    } else {
        query_range(&tiles.first, &tiles.end, &place, bp)
    };
    let mut steps = range.tiles * (group / comptime!(bp.heads));
    let step_list = if comptime!(bp.pattern.is_planned()) {
        let (tiles, capacity) = (grid.slots as usize, grid.capacity as usize);
        let tile = CUBE_POS_X as usize % tiles;
        StepList::new(
            &source.list,
            &source.counts,
            batch,
            kv_head,
            tile,
            tiles,
            capacity,
        )
    } else {
        StepList::none()
    };
    if comptime!(bp.pattern.is_planned()) {
        steps = step_list.total;
    }
    let mask = if comptime!(bp.pattern.is_planned() || bp.pattern.has_head_bias()) {
        let first = start + warp % comptime!(bp.role_warps) * comptime!(bp.warp_keys());
        KeyMask::new(
            &source.scores,
            &source.counts,
            &source.intervals,
            batch,
            kv_head,
            q_heads,
            group,
            first,
            k_len,
            bp,
        )
    } else {
        KeyMask::none()
    };

    let rows = QueryRows::new::<E>(&inputs.q, &inputs.grad_out, batch, kv_head, group);
    let size!(NS) = comptime!(bp.products().values());
    let size!(NO) = comptime!(bp.sums().values());
    let size!(NA) = comptime!(4 * bp.fragments);
    let logit_scale = LogitScale::new(scaling, bp.softcap);
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
        let k_rows = RowAddress::of::<E>(&inputs.k, batch, kv_head);
        let v_rows = RowAddress::of::<E>(&inputs.v, batch, kv_head);
        let mut at = unit;
        while at < comptime!(bp.keys() * bp.chunks()) {
            let (row, col) = (at / chunks, at % chunks);
            let place = swizzle(row, col, chunks);
            if start + row < count {
                let key = key_of(&source.list, list_row, start, row, bp);
                let from = k_rows.base + key * k_rows.stride + col;
                copy_async(
                    &inputs.k[from..from + 1],
                    &mut tiles.k[place..place + 1],
                    8u32,
                );
                let from = v_rows.base + key * v_rows.stride + col;
                copy_async(
                    &inputs.v[from..from + 1],
                    &mut tiles.v[place..place + 1],
                    8u32,
                );
            } else {
                tiles.k[place] = Vector::new(E::from_int(0));
                tiles.v[place] = Vector::new(E::from_int(0));
            }
            at += comptime!(bp.units());
        }
        copy_step::<E>(
            inputs,
            &rows,
            &Cursor::first_of(&step_list, &range, bp),
            0usize,
            &mut tiles,
            bp,
        );
        commit_copies();
        let mut s = Array::<Vector<f32, NS>>::new(comptime!(bp.rows / 16 / bp.products().blocks));
        let bias_keys = BiasKeys {
            start,
            count,
            row: (batch * q_heads + rows.head) * k_len,
        };
        let mut key_scores = Array::<f32>::new(comptime!(bp.fragments * 2));
        let score_row = score_row(&source.scores, batch, kv_head, bp);
        #[unroll]
        for n in 0..comptime!(bp.fragments * 2) {
            let slot = slot_of(n, bp);
            key_scores[n] = 0.0f32;
            if comptime!(bp.pattern.has_shared_score()) && start + slot < count {
                key_scores[n] =
                    source.scores[score_row + key_of(&source.list, list_row, start, slot, bp)];
            }
        }
        if warp < comptime!(bp.role_warps) {
            any_broken = stream_queries::<E, NS, NO, NA>(
                inputs,
                &rows,
                &range,
                &step_list,
                steps,
                &mask,
                &bias_keys,
                &logit_scale,
                &mut key_scores,
                &mut tiles,
                &mut s,
                &mut acc,
                &mut score_sums,
                &mut grads.scores,
                true,
                bp,
            );
        } else {
            any_broken = stream_queries::<E, NS, NO, NA>(
                inputs,
                &rows,
                &range,
                &step_list,
                steps,
                &mask,
                &bias_keys,
                &logit_scale,
                &mut key_scores,
                &mut tiles,
                &mut s,
                &mut acc,
                &mut score_sums,
                &mut grads.scores,
                false,
                bp,
            );
        }
    }

    let left = count - start;
    if warp < comptime!(bp.role_warps) {
        write_rows::<O, NO>(
            &source.list,
            list_row,
            start,
            &acc,
            &mut grads.v,
            1.0f32,
            kv_row * k_len,
            left,
            bp,
        );
        if any_broken {
            repair_keys::<E, O>(
                inputs,
                source,
                &place,
                &rows,
                &mask,
                &logit_scale,
                &mut grads.v,
                true,
                bp,
            );
        }
    } else {
        write_rows::<O, NO>(
            &source.list,
            list_row,
            start,
            &acc,
            &mut grads.k,
            scaling.scale,
            kv_row * k_len,
            left,
            bp,
        );
        if any_broken {
            repair_keys::<E, O>(
                inputs,
                source,
                &place,
                &rows,
                &mask,
                &logit_scale,
                &mut grads.k,
                false,
                bp,
            );
        }
        if comptime!(bp.pattern.has_shared_score()) {
            #[unroll]
            for n in 0..comptime!(bp.fragments * 2) {
                let sum = quad_sum(score_sums[n]);
                let slot = slot_of(n, bp);
                if lane % 4 == 0 && slot < left {
                    let at = row_of(&source.list, list_row, start, slot, kv_row * k_len, bp);
                    if comptime!(bp.shared_keys) {
                        add_to(&mut grads.scores[at..at + 1], sum);
                    } else {
                        grads.scores[at] = sum;
                    }
                }
            }
        }
    }
}
