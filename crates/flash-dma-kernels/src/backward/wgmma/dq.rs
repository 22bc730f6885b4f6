//! The gradient of q on Hopper's tensor cores: query tiles stream the keys they attend to.

use super::keys::KeyBoxes;
use crate::forward::mma::{
    BitCopies, CubeTile, KeyCopies, LogitScale, MaskRows, MmaBlueprint, RowAddress, Stages,
    TileKeys, TileRow, copy_queries, is_set, listed_key, score, score_row, sees, write_row,
    zero_not_finite,
};
use crate::tile::is_finite;
use crate::tile::mma::{Chunk, commit_copies, wait_copies};
use crate::tile::wgmma::{
    Panels, Ring, Turns, finish, finish_but, pack, publish, start_nt, start_pv,
};
use cubecl::prelude::*;

/// `dq_mma_kernel` with `wgmma`: the same cube, buffers and order. A
/// warpgroup owns 64 rows of the query tile: their queries and output gradients lie in shared memory, their
/// dQ in its registers.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(in crate::backward) fn dq_wgmma_kernel<E: Float>(
    q: &Tensor<Chunk<E>>,
    k: &Tensor<Chunk<E>>,
    v: &Tensor<Chunk<E>>,
    grad_out: &Tensor<Chunk<E>>,
    scores: &Tensor<f32>,
    intervals: &[Vector<u32, Const<2>>],
    list: &Tensor<u32>,
    counts: &Tensor<u32>,
    lse: &[f32],
    delta: &[f32],
    grad_q: &mut [Vector<E, Const<2>>],
    scale: f32,
    softcap: f32,
    k_boxes: &ComptimeOption<TensorMap<E, Tiled>>,
    v_boxes: &ComptimeOption<TensorMap<E, Tiled>>,
    first_tile: u32,
    cubes: u32,
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
    let (q_heads, q_len) = (q.shape(1), q.shape(2));
    let (kv_heads, k_len) = (k.shape(1), k.shape(2));

    let cube = CubeTile::new(q_heads, kv_heads, first_tile, cubes, bp).planned(list, counts, bp);
    let (batch, tile, first_head) = (cube.batch, cube.tile, cube.first_head);
    let (kv_head, kv_row) = (cube.kv_head, cube.kv_row);
    let keys = TileKeys::new(list, counts, &cube, q_len, k_len, bp);

    // The rows of Q and dO, `[warpgroups, head_dim / 64, 64 rows, 64]`; those that are no query are zero.
    let tile_chunks = comptime!(bp.tile_rows() * bp.chunks());
    let mut q_tile = Shared::<[Chunk<E>]>::new_aligned_slice(tile_chunks, 1024usize);
    let mut o_tile = Shared::<[Chunk<E>]>::new_aligned_slice(tile_chunks, 1024usize);
    copy_queries::<E>(q, &mut q_tile, batch, tile, first_head, q_len, k_len, bp);
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
    // Whether a stage has held keys that are not finite.
    let mut marks = Shared::<[u32]>::new_slice(comptime!(bp.stages));
    if (UNIT_POS as usize) < comptime!(bp.stages) {
        marks[UNIT_POS as usize] = 0u32;
    }
    let k_rows = RowAddress::of::<E>(k, batch, kv_head);
    let v_rows = RowAddress::of::<E>(v, batch, kv_head);
    let score_row = score_row(scores, &cube, bp);
    let logit_scale = LogitScale::new(scale, softcap, bp.softcap);
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
        lse0 = lse[to0];
        delta0 = delta[to0];
    }
    if row1.valid {
        lse1 = lse[to1];
        delta1 = delta[to1];
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
    let mask = MaskRows::new(list, counts, &cube, &keys, q_len, k_len, bp);
    let bits = BitCopies::new::<E>(intervals, list, &mask, &keys, &stages, q_len, bp);
    let mut copies = KeyCopies::new::<E>(k, v, list, &k_rows, &v_rows, &keys, bits, &stages, bp);
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
                    scores,
                    intervals,
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
        // The queries, which all units copied; else their copies count with those of the first tile.
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
        if comptime!(bp.masked) {
            careful = boundary && mask.careful;
        }
        if careful {
            if zero_not_finite::<E>(&mut stages.k, tile, false, bp) {
                marks[stage] = 1u32;
            }
            // What the other units have marked.
            sync_cube();
        }
        acc = finish::<NO>(acc, comptime!(bp.head_dim / 2));
        if tile > 0 {
            // The stage of the tile before, which the copies below fill again.
            ring.arrive_empty((tile + ahead) % comptime!(bp.stages));
        }
        turns.wait(tile, comptime!(bp.warps / 4));
        // S = Q K^T, and dP = dO V^T behind it.
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
                    scores,
                    intervals,
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
        if comptime!(bp.masked) {
            // On their way while the tensor cores multiply.
            if boundary {
                seen0 = mask.words::<E>(&stages, &row0, tile, bp);
                seen1 = mask.words::<E>(&stages, &row1, tile, bp);
            }
        }
        let s = finish_but::<NS>(s, 1usize, comptime!(bp.key_tile / 2));
        // The code of boundary tiles apart: a branch an element would keep the others from
        // overlapping.
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
                false,
                bp,
            )
        };
        if careful && marks[stage] == 1u32 {
            // All warps have their logits: only the product with dS is left to this tile.
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

    // A row without any logit above -inf has no gradient: its LSE is -inf, told by what the loop keeps of it.
    let none = f32::new(f32::NEG_INFINITY);
    let empty0 = upper.reference == f32::new(f32::INFINITY);
    let empty1 = lower.reference == f32::new(f32::INFINITY);
    if row0.valid {
        let at = to0 * comptime!(bp.head_dim / 2) + quad;
        write_row::<E, NO>(grad_q, &acc, at, scale, empty0, 0usize, bp);
    }
    if row1.valid {
        let at = to1 * comptime!(bp.head_dim / 2) + quad;
        write_row::<E, NO>(grad_q, &acc, at, scale, empty1, 1usize, bp);
    }

    sync_cube();
    let mut marked = false;
    for stage in 0..comptime!(bp.stages) {
        marked = marked || marks[stage] == 1u32;
    }
    if marked && (UNIT_POS as usize) < comptime!(bp.tile_rows()) {
        let row = TileRow::new(UNIT_POS as usize, tile, first_head, q_len, k_len, bp);
        let to = (batch * q_heads + row.head) * q_len + row.query;
        if row.valid && lse[to] != none {
            let mut slot = full_tiles * key_tile;
            while slot < keys.total {
                let mut key = slot;
                let mut first = slot as i32;
                let mut end = k_len as i32;
                if comptime!(bp.sparse) {
                    key = list[keys.list + slot] as usize;
                    let interval = intervals[kv_row * k_len + key];
                    first = interval.extract(0usize) as i32;
                    end = interval.extract(1usize) as i32;
                } else if comptime!(bp.masked) {
                    key = listed_key(list, &keys, slot);
                    // What it sees lies before the end of the keys, and of causal masking.
                    first = i32::new(comptime!(i32::MIN as i64));
                    if !mask.sees(intervals, list, &row, slot, q_len, bp) {
                        end = first;
                    }
                }
                if first <= row.position && row.position < end {
                    for c in 0..chunks {
                        let values = k[k_rows.base + key * k_rows.stride + c];
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

/// What a lane knows of a row of the query tile that it holds elements of.
#[derive(CubeType, Clone, Copy)]
struct LaneRow {
    /// `-log2(e) * lse`.
    reference: f32,
    /// Its row sum.
    delta: f32,
}

/// dS of a key tile, rounded, as an A operand, of S and of dP, which is under way: P is computed meanwhile. This
/// lane holds elements of two rows. On a `boundary` tile zero where a row does not see a key; if `bp.masked`, the words
/// of the rows say which they see.
#[cube]
fn gradients<E: Float, NS: Size, NP: Size>(
    s: &Vector<f32, NS>,
    dp: Vector<f32, NS>,
    row0: &TileRow,
    row1: &TileRow,
    upper: &LaneRow,
    lower: &LaneRow,
    seen0: Vector<u32, Const<2>>,
    seen1: Vector<u32, Const<2>>,
    stages: &Stages<E>,
    tile: usize,
    k_len: usize,
    logit_scale: &LogitScale,
    #[comptime] boundary: bool,
    #[comptime] bp: MmaBlueprint,
) -> Vector<u32, NP> {
    let quad = UNIT_POS_X as usize % 4;
    // P, times the softcap's slope.
    let mut p = Vector::<f32, NS>::new(0.0f32);
    #[unroll]
    for n in 0..comptime!(bp.key_tile / 8) {
        #[unroll]
        for e in 0..2usize {
            let z = score::<E>(stages, tile, comptime!(n * 8 + e) + quad * 2, bp);
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let (capped, scored) = comptime!((bp.softcap, bp.sparse || bp.biased));
            let mut p0 = logit_scale.weight(s.extract(at0), z, upper.reference, capped, scored);
            let mut p1 = logit_scale.weight(s.extract(at1), z, lower.reference, capped, scored);
            if comptime!(bp.softcap) {
                let x0 = logit_scale.apply(s.extract(at0), 0.0f32, bp.softcap);
                let x1 = logit_scale.apply(s.extract(at1), 0.0f32, bp.softcap);
                p0 *= logit_scale.slope(x0, bp.softcap);
                p1 *= logit_scale.slope(x1, bp.softcap);
            }
            p.insert(at0, p0);
            p.insert(at1, p1);
        }
    }
    let dp = finish::<NS>(dp, comptime!(bp.key_tile / 2));
    let mut packed = Vector::<u32, NP>::new(0u32);
    #[unroll]
    for n in 0..comptime!(bp.key_tile / 8) {
        let mut ds = Vector::<f32, Const<4>>::new(0.0f32);
        #[unroll]
        for e in 0..2usize {
            let col = comptime!(n * 8 + e) + quad * 2;
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            let mut ds0 = p.extract(at0) * (dp.extract(at0) - upper.delta);
            let mut ds1 = p.extract(at1) * (dp.extract(at1) - lower.delta);
            if comptime!(boundary && bp.masked) {
                ds0 = select(is_set(seen0, comptime!(n * 8 + e)), ds0, 0.0f32);
                ds1 = select(is_set(seen1, comptime!(n * 8 + e)), ds1, 0.0f32);
            } else if comptime!(boundary) {
                ds0 = select(sees::<E>(row0, stages, tile, col, k_len, bp), ds0, 0.0f32);
                ds1 = select(sees::<E>(row1, stages, tile, col, k_len, bp), ds1, 0.0f32);
            }
            ds.insert(e, ds0);
            ds.insert(comptime!(2 + e), ds1);
        }
        #[unroll]
        for half in 0..2usize {
            let (x, y) = comptime!((half * 2, half * 2 + 1));
            let pair = pack(ds.extract(x), ds.extract(y), comptime!(bp.element));
            packed.insert(comptime!(n * 2 + half), pair);
        }
    }
    packed
}
