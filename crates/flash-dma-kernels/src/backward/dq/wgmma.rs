//! The gradient of q on Hopper's tensor cores: query tiles stream the keys they attend to.

use crate::args::Scaling;
use crate::backward::dq::key_boxes::KeyBoxes;
use crate::backward::dq::weights::{LaneRow, gradients};
use crate::finite::is_finite;
use crate::matrix::args::{KeySource, LaunchedTiles, Operands, SavedRows};
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::key_stream::KeyCopies;
use crate::matrix::logits::LogitScale;
use crate::matrix::mask::{BitCopies, MaskRows};
use crate::matrix::pair_bias::PairBias;
use crate::matrix::ptx::{commit_copies, wait_copies};
use crate::matrix::query_tile::{CubeTile, TileRow, copy_queries, score_row, write_row};
use crate::matrix::repair::{SlotKey, zero_not_finite};
use crate::matrix::stages::{RowAddress, Stages};
use crate::matrix::tile_keys::TileKeys;
use crate::matrix::wgmma::panel::{Panels, publish};
use crate::matrix::wgmma::product::{finish, finish_but, start_nt, start_pv};
use crate::matrix::wgmma::ring::{Ring, Turns};
use crate::pattern::layout::KEY_BLOCK;
use crate::vectors::Chunk;
use cubecl::prelude::*;

/// `dq_mma_kernel` with `wgmma`: the same cube, buffers and order. A
/// warpgroup owns 64 rows of the query tile: their queries and output gradients lie in shared memory, their
/// dQ in its registers.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dq_wgmma_kernel<E: Float>(
    operands: &Operands<E, Const<8>>,
    grad_out: &Tensor<Chunk<E>>,
    source: &KeySource,
    saved: &SavedRows,
    grad_q: &mut [Vector<E, Const<2>>],
    scaling: &Scaling,
    k_boxes: &ComptimeOption<TensorMap<E, Tiled>>,
    v_boxes: &ComptimeOption<TensorMap<E, Tiled>>,
    tiles_of: &LaunchedTiles,
    #[comptime] boxes: bool,
    #[comptime] bp: MmaBlueprint,
    #[define(E)] _element: ElemType,
) {
    let size!(NS) = comptime!(bp.key_tile / 2);
    let size!(NO) = comptime!(bp.head_dim / 2);
    let size!(NP) = comptime!(bp.key_tile / 4);
    let chunks = comptime!(bp.chunks());
    let key_tile = comptime!(bp.key_tile);
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let quad = lane % 4;
    let (q_heads, q_len) = (operands.q.shape(1), operands.q.shape(2));
    let (kv_heads, k_len) = (operands.k.shape(1), operands.k.shape(2));

    let cube = CubeTile::new(q_heads, kv_heads, tiles_of.first, tiles_of.count, bp).planned(
        &source.list,
        &source.counts,
        bp,
    );
    let (batch, tile, first_head) = (cube.batch, cube.tile, cube.first_head);
    let (kv_head, kv_row) = (cube.kv_head, cube.kv_row);
    let keys = TileKeys::new(&source.list, &source.counts, &cube, q_len, k_len, bp);

    // The rows of Q and dO, `[warpgroups, head_dim / 64, 64 rows, 64]`; rows without a query are zero.
    let tile_chunks = comptime!(bp.tile_rows() * bp.chunks());
    let mut q_tile = Shared::<[Chunk<E>]>::new_aligned_slice(tile_chunks, 1024usize);
    let mut o_tile = Shared::<[Chunk<E>]>::new_aligned_slice(tile_chunks, 1024usize);
    copy_queries::<E>(
        &operands.q,
        &mut q_tile,
        batch,
        tile,
        first_head,
        q_len,
        k_len,
        bp,
    );
    copy_queries::<E>(
        grad_out,
        &mut o_tile,
        batch,
        tile,
        first_head,
        q_len,
        k_len,
        bp,
    );

    let mut stages = Stages::<E>::new(bp);
    // Whether a stage has held non-finite keys.
    let mut marks = Shared::<[u32]>::new_slice(comptime!(bp.stages));
    if (UNIT_POS as usize) < comptime!(bp.stages) {
        marks[UNIT_POS as usize] = 0u32;
    }
    let k_rows = RowAddress::of::<E>(&operands.k, batch, kv_head);
    let v_rows = RowAddress::of::<E>(&operands.v, batch, kv_head);
    let score_row = score_row(&source.scores, &cube, bp);
    let bias = PairBias::new(&source.scores, &cube, bp);
    let logit_scale = LogitScale::new(scaling, bp.softcap);
    let own = warp / 4 * comptime!(64 * bp.chunks());
    let q_panels = Panels::at::<E>(&q_tile[own..own + 1]);
    let o_panels = Panels::at::<E>(&o_tile[own..own + 1]);
    let k_panels = Panels::at::<E>(&stages.k[0..1]);
    let v_panels = Panels::at::<E>(&stages.v[0..1]);

    let upper_row = warp * 16 + lane / 4;
    let row0 = TileRow::new(upper_row, tile, first_head, q_len, k_len, bp);
    let row1 = TileRow::new(upper_row + 8, tile, first_head, q_len, k_len, bp);
    let to0 = (batch * q_heads + row0.head) * q_len + row0.query;
    let to1 = (batch * q_heads + row1.head) * q_len + row1.query;
    let mut lse0 = 0.0f32;
    let mut lse1 = 0.0f32;
    let mut delta0 = 0.0f32;
    let mut delta1 = 0.0f32;
    if row0.valid {
        lse0 = saved.lse[to0];
        delta0 = saved.delta[to0];
    }
    if row1.valid {
        lse1 = saved.lse[to1];
        delta1 = saved.delta[to1];
    }
    let log2e = comptime!(core::f32::consts::LOG2_E);
    let upper = LaneRow {
        reference: -lse0 * log2e,
        delta: delta0,
    };
    let lower = LaneRow {
        reference: -lse1 * log2e,
        delta: delta1,
    };

    let full_tiles = keys.full / key_tile;
    let tiles = keys.total.div_ceil(key_tile);
    let mask = MaskRows::new(&source.list, &source.counts, &cube, &keys, q_len, k_len, bp);
    let bits = BitCopies::new::<E>(
        &source.intervals,
        &source.list,
        &mask,
        &keys,
        &stages,
        q_len,
        bp,
    );
    let mut copies =
        KeyCopies::new::<E, Const<8>>(operands, source, &k_rows, &v_rows, &keys, bits, &stages, bp);
    let key_boxes = KeyBoxes::new::<E>(k_boxes, v_boxes, &stages, batch, kv_head, &keys);
    let mut acc = Vector::<f32, NO>::new(0.0f32);
    let ahead = comptime!(bp.stages - 1);
    let turns = Turns::new();
    let ring = Ring::new(
        comptime!(bp.stages),
        comptime!(if boxes { 1 } else { bp.units() }),
        comptime!(bp.units()),
    );
    #[unroll]
    for tile in 0..ahead {
        if tile < tiles {
            if comptime!(boxes) {
                if UNIT_POS == 0 {
                    key_boxes.fill(&ring, tile, bp);
                }
            } else {
                copies.fill::<E>(
                    &ring,
                    source,
                    score_row,
                    kv_row * k_len,
                    &keys,
                    tile,
                    &mut stages,
                    bp,
                );
            }
        }
    }
    if comptime!(boxes) {
        // Waits for the queries, which all units copied; otherwise their copies count with the first tile's.
        commit_copies();
        wait_copies(0u32);
        sync_cube();
    }
    for tile in 0..tiles {
        let stage = tile % comptime!(bp.stages);
        let boundary = tile >= full_tiles;
        let begin = stage * comptime!(bp.key_tile * bp.chunks());
        let k_tile = k_panels.behind(begin);
        let v_tile = v_panels.behind(begin);
        ring.wait_full(stage, tile / comptime!(bp.stages));
        publish();
        let mut careful = boundary;
        if comptime!(bp.pattern.is_planned()) {
            careful = boundary && mask.careful;
        }
        if careful {
            if zero_not_finite::<E>(&mut stages.k, tile, false, bp) {
                marks[stage] = 1u32;
            }
            // Makes the other units' marks visible.
            sync_cube();
        }
        acc = finish::<NO>(acc, comptime!(bp.head_dim / 2));
        if tile > 0 {
            // The stage of the previous tile, which the copies below refill.
            ring.arrive_empty((tile + ahead) % comptime!(bp.stages));
        }
        turns.wait(tile, comptime!(bp.warps / 4));
        // S = Q K^T, followed by dP = dO V^T.
        let s = start_nt::<NS>(
            &q_panels,
            &k_tile,
            comptime!(bp.element),
            key_tile,
            comptime!(bp.head_dim),
        );
        let dp = start_nt::<NS>(
            &o_panels,
            &v_tile,
            comptime!(bp.element),
            key_tile,
            comptime!(bp.head_dim),
        );
        turns.pass(tile, tiles, comptime!(bp.warps / 4));
        if tile + ahead < tiles {
            if comptime!(boxes) {
                if UNIT_POS == 0 {
                    key_boxes.fill(&ring, tile + ahead, bp);
                }
            } else {
                copies.fill::<E>(
                    &ring,
                    source,
                    score_row,
                    kv_row * k_len,
                    &keys,
                    tile + ahead,
                    &mut stages,
                    bp,
                );
            }
        }
        let mut seen0 = Vector::<u32, Const<2>>::new(0u32);
        let mut seen1 = Vector::<u32, Const<2>>::new(0u32);
        if comptime!(bp.pattern.is_planned()) {
            // In flight while the tensor cores multiply.
            if boundary {
                seen0 = mask.words::<E>(&stages, &row0, tile, bp);
                seen1 = mask.words::<E>(&stages, &row1, tile, bp);
            }
        }
        let mut z = Vector::<f32, NS>::new(0.0f32);
        if comptime!(bp.pattern.has_pair_bias()) {
            let mut first_key = keys.begin + tile * key_tile;
            if comptime!(bp.pattern.is_planned()) {
                // Not gathered: a step is a block.
                first_key = source.list[keys.list + tile] as usize * KEY_BLOCK;
            }
            // On their way as well.
            z = bias.tile::<NS>(
                &source.scores,
                &row0,
                &row1,
                first_key,
                q_len,
                k_len,
                key_tile,
            );
        }
        let s = finish_but::<NS>(s, 1usize, comptime!(bp.key_tile / 2));
        // Separate code for boundary tiles: a branch per element would prevent the other instructions from overlapping.
        let ds = if boundary {
            gradients::<E, NS, NP>(
                &s,
                dp,
                &row0,
                &row1,
                &upper,
                &lower,
                seen0,
                seen1,
                &stages,
                tile,
                k_len,
                &logit_scale,
                &z,
                true,
                bp,
            )
        } else {
            gradients::<E, NS, NP>(
                &s,
                dp,
                &row0,
                &row1,
                &upper,
                &lower,
                seen0,
                seen1,
                &stages,
                tile,
                k_len,
                &logit_scale,
                &z,
                false,
                bp,
            )
        };
        if careful && marks[stage] == 1u32 {
            // All warps have their logits: only the product with dS remains for this tile.
            sync_cube();
            let _any = zero_not_finite::<E>(&mut stages.k, tile, true, bp);
            publish();
            sync_cube();
        }
        // dQ += dS K.
        acc = start_pv::<NO, NP>(
            acc,
            ds,
            &k_tile,
            comptime!(bp.element),
            comptime!(bp.head_dim),
            key_tile,
        );
    }
    acc = finish::<NO>(acc, comptime!(bp.head_dim / 2));

    // A row without any logit above -inf has no gradient: its LSE is -inf, which shows in the value that the loop
    // keeps.
    let none = f32::new(f32::NEG_INFINITY);
    let empty0 = upper.reference == f32::new(f32::INFINITY);
    let empty1 = lower.reference == f32::new(f32::INFINITY);
    if row0.valid {
        let at = to0 * comptime!(bp.head_dim / 2) + quad;
        write_row::<E, NO>(grad_q, &acc, at, scaling.scale, empty0, 0usize, bp);
    }
    if row1.valid {
        let at = to1 * comptime!(bp.head_dim / 2) + quad;
        write_row::<E, NO>(grad_q, &acc, at, scaling.scale, empty1, 1usize, bp);
    }

    sync_cube();
    let mut marked = false;
    for stage in 0..comptime!(bp.stages) {
        marked = marked || marks[stage] == 1u32;
    }
    if marked && (UNIT_POS as usize) < comptime!(bp.tile_rows()) {
        let row = TileRow::new(UNIT_POS as usize, tile, first_head, q_len, k_len, bp);
        let to = (batch * q_heads + row.head) * q_len + row.query;
        if row.valid && saved.lse[to] != none {
            let mut slot = full_tiles * key_tile;
            while slot < keys.total {
                let listed = SlotKey::new(
                    slot,
                    k_len as i32,
                    &row,
                    &keys,
                    source,
                    &mask,
                    kv_row * k_len,
                    q_len,
                    bp,
                );
                let key = listed.key;
                if listed.first <= row.position && row.position < listed.end {
                    for c in 0..chunks {
                        let values = operands.k[k_rows.base + key * k_rows.stride + c];
                        #[unroll]
                        for pair in 0..4usize {
                            let at = to * comptime!(bp.head_dim / 2) + c * 4 + pair;
                            #[unroll]
                            for e in 0..2usize {
                                let value = f32::cast_from(values.extract(comptime!(pair * 2 + e)));
                                if !is_finite(value) {
                                    // Such a key's logit is not finite: dS is zero or NaN, and its
                                    // product with the element NaN.
                                    let mut sums = grad_q[at];
                                    sums.insert(e, E::cast_from(f32::new(f32::NAN)));
                                    grad_q[at] = sums;
                                }
                            }
                        }
                    }
                }
                slot += 1;
            }
        }
    }
}
