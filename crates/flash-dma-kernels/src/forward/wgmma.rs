//! Forward attention on Hopper's tensor cores: `wgmma` over key tiles that `cp.async` gathers.

use crate::args::Scaling;
use crate::matrix::args::{KeySource, LaunchedTiles, Operands, Outputs};
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::fragment::{pack, quad_max, quad_sum};
use crate::matrix::key_stream::KeyCopies;
use crate::matrix::logits::{LogitScale, SLACK, exp_of, rescale_to, visible_logits};
use crate::matrix::mask::{BitCopies, MaskRows};
use crate::matrix::pair_bias::PairBias;
use crate::matrix::ptx::any_lane;
use crate::matrix::query_tile::{
    CubeTile, TileRow, copy_queries, first_output_head, score_row, write_row,
};
use crate::matrix::repair::{add_not_finite, zero_not_finite};
use crate::matrix::stages::{RowAddress, Stages};
use crate::matrix::tile_keys::TileKeys;
use crate::matrix::wgmma::panel::{Panels, publish};
use crate::matrix::wgmma::product::{finish, start_nt, start_pv};
use crate::matrix::wgmma::ring::{Ring, Turns};
use crate::vectors::Chunk;
use cubecl::prelude::*;

/// [`forward_mma_kernel`](crate::forward::mma::forward_mma_kernel) with `wgmma`: the same cube, buffers and
/// order. A warpgroup owns 64 rows of the query tile: their queries lie in shared memory, their logits,
/// probabilities and output in its registers.
///
/// All units copy; the stages of the [`Ring`] let one warpgroup compute its softmax while the tensor cores work for the
/// others. One iteration: start S, then start copies `ahead` tiles ahead; wait for S and for the previous tile's
/// product with V; softmax; start the product with V.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_wgmma_kernel<E: Float, O: Float>(
    operands: &Operands<E, Const<8>>,
    source: &KeySource,
    outputs: &mut Outputs<O>,
    scaling: &Scaling,
    tiles_of: &LaunchedTiles,
    #[comptime] bp: MmaBlueprint,
    #[define(E)] _element: ElemType,
    #[define(O)] _output: ElemType,
) {
    let size!(NS) = comptime!(bp.key_tile / 2);
    let size!(NO) = comptime!(bp.output_elements());
    let size!(NP) = comptime!(bp.key_tile / 4);
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
    let keys = TileKeys::new(&source.list, &source.counts, &cube, q_len, k_len, bp).part(bp);

    // The queries, `[warpgroups, head_dim / 64, 64 rows, 64]`.
    let mut queries =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(bp.tile_rows() * bp.chunks()), 1024usize);
    copy_queries::<E>(
        &operands.q,
        &mut queries,
        batch,
        tile,
        first_head,
        q_len,
        k_len,
        bp,
    );

    let mut stages = Stages::<E>::new(bp);
    let mut mark = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        mark[0] = 0u32;
    }
    let k_rows = RowAddress::of::<E>(&operands.k, batch, kv_head).starting_at(keys.begin);
    let v_rows = RowAddress::of::<E>(&operands.v, batch, kv_head).starting_at(keys.begin);
    let mask = MaskRows::new(&source.list, &source.counts, &cube, &keys, q_len, k_len, bp);
    let score_row = score_row(&source.scores, &cube, bp);
    let bias = PairBias::new(&source.scores, &cube, bp);
    let logit_scale = LogitScale::new(scaling, bp.softcap);
    let first_row = warp / 4 * comptime!(64 * bp.chunks());
    let own_queries = Panels::at::<E>(&queries[first_row..first_row + 1]);
    let k_panels = Panels::at::<E>(&stages.k[0..1]);
    let v_panels = Panels::at::<E>(&stages.v[0..1]);

    let upper_row = warp * 16 + lane / 4;
    let row0 = TileRow::new(upper_row, tile, first_head, q_len, k_len, bp).starting_at(keys.begin);
    let row1 =
        TileRow::new(upper_row + 8, tile, first_head, q_len, k_len, bp).starting_at(keys.begin);
    let mut acc = Vector::<f32, NO>::new(0.0f32);
    let mut max0 = f32::new(f32::NEG_INFINITY);
    let mut max1 = f32::new(f32::NEG_INFINITY);
    let mut sum0 = 0.0f32;
    let mut sum1 = 0.0f32;
    let log2e = comptime!(core::f32::consts::LOG2_E);

    let full_tiles = keys.full / key_tile;
    let tiles = keys.total.div_ceil(key_tile);
    let turns = Turns::new();
    let ring = Ring::new(
        comptime!(bp.stages),
        comptime!(bp.units()),
        comptime!(bp.units()),
    );
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
    // A stage is filled again `lag` tiles behind its use: two let a product with V stay under way until
    // the next tile's logits are there.
    let lag = comptime!(if bp.stages == 2 { 1usize } else { 2 });
    let ahead = comptime!(bp.stages - lag);
    #[unroll]
    for tile in 0..ahead {
        if tile < tiles {
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
    for tile in 0..tiles {
        let boundary = tile >= full_tiles;
        let slot = tile % comptime!(bp.stages);
        let begin = slot * comptime!(bp.key_tile * bp.chunks());
        let k_tile = k_panels.behind(begin);
        let v_tile = v_panels.behind(begin);
        ring.wait_full(slot, tile / comptime!(bp.stages));
        publish();
        let mut careful = boundary;
        if comptime!(bp.pattern.is_planned()) {
            careful = boundary && mask.careful;
        }
        if careful {
            if zero_not_finite::<E>(&mut stages.v, tile, true, bp) {
                mark[0] = 1u32;
            }
            publish();
            // Makes the other units' zeros visible.
            sync_cube();
        }
        turns.wait(tile, comptime!(bp.warps / 4));
        let products = start_nt::<NS>(
            &own_queries,
            &k_tile,
            comptime!(bp.element),
            key_tile,
            comptime!(bp.head_dim),
        );
        turns.pass(tile, tiles, comptime!(bp.warps / 4));
        if tile + ahead < tiles {
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
        let mut seen0 = Vector::<u32, Const<2>>::new(0u32);
        let mut seen1 = Vector::<u32, Const<2>>::new(0u32);
        if comptime!(bp.pattern.is_planned()) {
            // In flight while the tensor cores multiply.
            if boundary {
                seen0 = mask.words::<E>(&stages, &row0, tile, bp);
                seen1 = mask.words::<E>(&stages, &row1, tile, bp);
            }
        }
        let products = finish::<NS>(products, comptime!(bp.key_tile / 2));
        if comptime!(lag == 2) {
            acc = finish::<NO>(acc, comptime!(bp.output_elements()));
            if tile > 0 {
                ring.arrive_empty((tile - 1) % comptime!(bp.stages));
            }
        }
        // Logits, and the new maxima of the two rows.
        let s = visible_logits::<E, NS>(
            &products,
            &stages,
            source,
            &keys,
            tile,
            &row0,
            &row1,
            seen0,
            seen1,
            boundary,
            &logit_scale,
            &bias,
            q_len,
            k_len,
            bp,
        );
        let mut new0 = max0;
        let mut new1 = max1;
        #[unroll]
        for n in 0..comptime!(bp.key_tile / 8) {
            #[unroll]
            for e in 0..2usize {
                new0 = max(new0, s.extract(comptime!(n * 4 + e)));
                new1 = max(new1, s.extract(comptime!(n * 4 + 2 + e)));
            }
        }
        let none = f32::new(f32::NEG_INFINITY);
        new0 = quad_max(new0);
        new1 = quad_max(new1);
        if any_lane(new0 > max0 + SLACK || new1 > max1 + SLACK) {
            // A row that has seen no key yet rescales zeros, by any finite factor.
            let rescale0 = rescale_to(max0, new0);
            let rescale1 = rescale_to(max1, new1);
            max0 = new0;
            max1 = new1;
            sum0 *= rescale0;
            sum1 *= rescale1;
            #[unroll]
            for n in 0..comptime!(bp.head_dim / 8) {
                #[unroll]
                for e in 0..2usize {
                    let at0 = comptime!(n * 4 + e);
                    let at1 = comptime!(n * 4 + 2 + e);
                    acc.insert(at0, acc.extract(at0) * rescale0);
                    acc.insert(at1, acc.extract(at1) * rescale1);
                }
            }
        }
        // A row that has seen no key yet: against any finite reference its probabilities are 0.
        let reference0 = select(max0 == none, 0.0f32, -max0 * log2e);
        let reference1 = select(max1 == none, 0.0f32, -max1 * log2e);

        let mut p = Vector::<u32, NP>::new(0u32);
        #[unroll]
        for n in 0..comptime!(bp.key_tile / 8) {
            let a = exp_of(s.extract(comptime!(n * 4)), reference0);
            let b = exp_of(s.extract(comptime!(n * 4 + 1)), reference0);
            let c = exp_of(s.extract(comptime!(n * 4 + 2)), reference1);
            let d = exp_of(s.extract(comptime!(n * 4 + 3)), reference1);
            sum0 += a + b;
            sum1 += c + d;
            p.insert(comptime!(n * 2), pack(a, b, comptime!(bp.element)));
            p.insert(comptime!(n * 2 + 1), pack(c, d, comptime!(bp.element)));
        }
        acc = start_pv::<NO, NP>(
            acc,
            p,
            &v_tile,
            comptime!(bp.element),
            comptime!(bp.head_dim),
            key_tile,
        );
        if comptime!(lag == 1) {
            acc = finish::<NO>(acc, comptime!(bp.output_elements()));
            ring.arrive_empty(slot);
        }
    }
    if comptime!(lag == 2) {
        acc = finish::<NO>(acc, comptime!(bp.output_elements()));
    }

    sum0 = quad_sum(sum0);
    sum1 = quad_sum(sum1);
    // No key at all, or none with a logit above -inf: zeros and an LSE of -inf. NaN stays NaN.
    let empty0 = sum0 == 0.0f32;
    let empty1 = sum1 == 0.0f32;
    let factor0 = 1.0f32 / sum0;
    let factor1 = 1.0f32 / sum1;
    let none = f32::new(f32::NEG_INFINITY);
    let out_head = first_output_head(batch, operands.q.shape(0), q_heads, bp);
    let to0 = (out_head + row0.head) * q_len + row0.query;
    let to1 = (out_head + row1.head) * q_len + row1.query;
    if row0.valid {
        let at = to0 * comptime!(bp.head_dim / 2) + quad;
        write_row::<O, NO>(&mut outputs.out, &acc, at, factor0, empty0, 0usize, bp);
    }
    if row1.valid {
        let at = to1 * comptime!(bp.head_dim / 2) + quad;
        write_row::<O, NO>(&mut outputs.out, &acc, at, factor1, empty1, 1usize, bp);
    }
    if quad == 0 {
        if row0.valid {
            outputs.lse[to0] = select(empty0, none, max0 + sum0.ln());
        }
        if row1.valid {
            outputs.lse[to1] = select(empty1, none, max1 + sum1.ln());
        }
    }
    sync_cube();
    if mark[0] == 1u32 && (UNIT_POS as usize) < comptime!(bp.tile_rows()) {
        let row = TileRow::new(UNIT_POS as usize, tile, first_head, q_len, k_len, bp)
            .starting_at(keys.begin);
        let q_row = (batch * operands.q.stride(0)
            + row.head * operands.q.stride(1)
            + row.query * operands.q.stride(2))
            / 8;
        add_not_finite::<E, O, Const<8>>(
            operands,
            source,
            outputs,
            &row,
            &keys,
            &k_rows,
            &v_rows,
            q_row,
            score_row,
            kv_row * k_len,
            (out_head + row.head) * q_len + row.query,
            full_tiles * key_tile,
            &mask,
            &bias,
            &logit_scale,
            8usize,
            bp,
        );
    }
}
