//! Forward attention on Hopper's tensor cores: `wgmma` over key tiles that `cp.async` gathers.

use crate::args::Scaling;
use crate::matrix::args::{KeySource, LaunchedTiles, Operands, Outputs};
use crate::matrix::attended::AttendedKeys;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::dropout::lane_mask;
use crate::matrix::key_stream::KeyCopies;
use crate::matrix::logits::visible_logits;
use crate::matrix::ptx::{commit_copies, wait_copies};
use crate::matrix::query_tile::{copy_queries, first_output_head};
use crate::matrix::repair::{add_not_finite, zero_not_finite};
use crate::matrix::rows::{CubeTile, OutputRows, RowPair};
use crate::matrix::softmax::{Columns, OnlineSoftmax, PerRow, packed};
use crate::matrix::stages::Stages;
use crate::matrix::tile_keys::TileKeys;
use crate::matrix::wgmma::key_boxes::{KeyBoxes, KeyMaps};
use crate::matrix::wgmma::panel::{Panels, publish};
use crate::matrix::wgmma::product::{finish, finish_but, start_nt, start_pv};
use crate::matrix::wgmma::ring::Ring;
use crate::matrix::wgmma::rows::{RowToWrite, write_row, write_row_exactly};
use crate::vectors::Segment;
use cubecl::prelude::*;

/// [`forward_mma_kernel`](crate::forward::mma::forward_mma_kernel) with `wgmma`: the same cube, buffers and
/// order. A warpgroup owns 64 rows of the query tile: their queries lie in shared memory, their logits,
/// probabilities and output in its registers.
///
/// One iteration: start S and the product of the tile before with V, then the copies of a later tile: by the tensor memory
/// accelerator where keys are contiguous, otherwise by all units; wait for S; softmax; wait for the product with V.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_wgmma_kernel<E: Float, O: Float>(
    operands: &Operands<E, Const<8>>,
    source: &KeySource,
    outputs: &mut Outputs<O>,
    scaling: &Scaling,
    maps: &KeyMaps<E>,
    tiles_of: &LaunchedTiles,
    #[comptime] bp: MmaBlueprint,
    #[define(E)] _element: ElemType,
    #[define(O)] _output: ElemType,
) {
    // CubeCL's vectors have a power of two of elements; those after the last are never used.
    let size!(NS) = comptime!((bp.key_tile / 2).next_power_of_two());
    let size!(NO) = comptime!(bp.output_elements());
    let size!(NP) = comptime!((bp.key_tile / 4).next_power_of_two());
    let as_boxes = maps.exist;
    let (element, head_dim, key_tile) = comptime!((bp.element, bp.head_dim, bp.key_tile));
    let columns = comptime!(Columns::first(bp.key_tile));
    let stage_segments = comptime!(bp.key_tile * bp.segments());
    let (lane, warp) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let own = CubeTile::new::<E, Const<8>>(operands, source, tiles_of, bp);
    let keys = TileKeys::new(source, &own).part(bp);

    // The queries, `[warpgroups, head_dim / 64, 64 rows, 64]`.
    let mut queries = Shared::<[Segment<E>]>::new_aligned_slice(
        comptime!(bp.tile_rows() * bp.segments()),
        1024usize,
    );
    copy_queries::<E>(&operands.q, &mut queries, &own);

    let mut stages = Stages::<E>::new(bp);
    // True if a boundary tile had values that are not finite.
    let mut not_finite = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        not_finite[0] = 0u32;
    }
    let attended = AttendedKeys::new::<E, Const<8>>(operands, source, scaling, own, keys);
    let own = &attended.own;
    let keys = &attended.keys;
    let first_row = warp / 4 * comptime!(64 * bp.segments());
    let own_queries = Panels::at::<E>(&queries[first_row..first_row + 1]);
    let k_panels = Panels::at::<E>(&stages.k[0..1]);
    let v_panels = Panels::at::<E>(&stages.v[0..1]);

    let rows = RowPair::new(warp * 16 + lane / 4, own, keys.begin, &source.slopes);
    let mut acc = Vector::<f32, NO>::new(0.0f32);
    let mut softmax = OnlineSoftmax::new(bp.residual);
    let mask = lane_mask(&scaling.dropout, &stages.columns, own, &rows);

    let full_tiles = keys.full_tiles(bp);
    let tiles = keys.tiles(bp);
    let ring = Ring::new(
        comptime!(bp.stages),
        comptime!(if as_boxes { 1 } else { bp.fillers() }),
        comptime!(bp.units()),
    );
    let mut copies = KeyCopies::new::<E, Const<8>>(operands, source, &attended, &stages);
    // The first warpgroup would wait for the others' tiles before its own softmax.
    let boxes = KeyBoxes::new::<E>(maps, &stages, &attended, comptime!(bp.units() as u32 - 128));
    // A stage is filled again two tiles behind its use: its product with V is under way during the next tile's softmax.
    let ahead = comptime!(bp.stages - 2);
    #[unroll]
    for tile in 0..ahead {
        if tile < tiles {
            boxes.fill_or_gather::<E>(&mut copies, &ring, source, &attended, tile, &mut stages);
        }
    }
    if comptime!(as_boxes) {
        // Waits for the queries, which all units copied; otherwise their copies count with the first tile's.
        commit_copies();
        wait_copies(0u32);
        publish();
        sync_cube();
    }
    let mut p = Vector::<u32, NP>::new(0u32);
    // The first tile is code of its own: nothing is under way yet.
    #[unroll]
    for pass in 0..2usize {
        let first = comptime!(pass == 0);
        let from = comptime!(pass).runtime();
        let mut to = tiles;
        if comptime!(first) {
            to = min(tiles, 1usize);
        }
        for tile in from..to {
            let boundary = tile >= full_tiles;
            let stage = tile % comptime!(bp.stages);
            let stage_before = (tile + comptime!(bp.stages - 1)) % comptime!(bp.stages);
            let k_tile = k_panels.behind(stage * stage_segments);
            ring.wait_full(stage, tile / comptime!(bp.stages));
            if comptime!(!as_boxes) {
                publish(); // Boxes are the products' to read as they land.
            }
            if attended.may_hide_not_finite(boundary) {
                if zero_not_finite::<E>(&mut stages.v, tile, true, bp) {
                    not_finite[0] = 1u32;
                }
                publish();
                sync_cube(); // Makes the other units' zeros visible.
            }
            let products = start_nt::<NS>(&own_queries, &k_tile, element, key_tile, head_dim);
            if comptime!(!first) {
                let v_before = v_panels.behind(stage_before * stage_segments);
                acc = start_pv::<NO, NP>(acc, p, &v_before, element, head_dim, key_tile);
            }
            if tile + ahead < tiles {
                let (next, to) = (tile + ahead, &mut stages);
                boxes.fill_or_gather::<E>(&mut copies, &ring, source, &attended, next, to);
            }
            let seen = (attended.mask).words_of_pair::<E>(&stages, &rows, tile, boundary, bp);
            let under_way = comptime!(usize::from(!first));
            let products = finish_but::<NS>(products, under_way, comptime!(bp.key_tile / 2));
            let mut s = visible_logits::<E, NS>(
                &products, &stages, source, &attended, &rows, &seen, tile, boundary,
            );
            let mut maxima = softmax.maxima();
            maxima.raise_to::<NS>(&s, key_tile);
            let outgrown = softmax.outgrown(&mut maxima);
            let mut factors = PerRow::both(1.0f32);
            if outgrown {
                factors.set(&softmax.rescale(&maxima));
                softmax.rebase::<NS>(&mut s, key_tile);
            }
            let references = softmax.references();
            softmax.note_tops(&maxima);
            let exponentials = softmax.exponentials::<NS>(&s, &references, columns);
            if comptime!(!first) {
                acc = finish::<NO>(acc, comptime!(bp.output_elements())); // P is free as well.
                ring.arrive_empty(stage_before);
            }
            let words = &stages.columns;
            p = packed::<NS, NP>(&exponentials, &mask, words, tile, columns, element);
            if comptime!(!first) && outgrown {
                scale_output::<NO>(&mut acc, &factors, bp);
            }
        }
    }
    if tiles > 0 {
        let v_last = v_panels.behind((tiles - 1) % comptime!(bp.stages) * stage_segments);
        acc = start_pv::<NO, NP>(acc, p, &v_last, element, head_dim, key_tile);
        acc = finish::<NO>(acc, comptime!(bp.output_elements()));
    }

    let mut sums = softmax.finish::<E>();
    sums.with_dropout(&scaling.dropout);
    let first_head = first_output_head(own.batch, operands.q.shape(0), own.q_heads, bp);
    let to = OutputRows::in_order(&rows, first_head, own.q_len, &outputs.order);
    let upper = sums.upper.row_to_write(to.upper, to.has_upper);
    let lower = sums.lower.row_to_write(to.lower, to.has_lower);
    write_output::<O, NO>(outputs, &acc, &upper, 0usize, bp);
    write_output::<O, NO>(outputs, &acc, &lower, 1usize, bp);
    let to = OutputRows::of_pair(&rows, first_head, own.q_len);
    outputs.write_lse(&sums, &to);
    sync_cube();
    if not_finite[0] == 1u32 && (UNIT_POS as usize) < comptime!(bp.tile_rows()) {
        add_not_finite::<E, O, Const<8>>(
            operands, source, outputs, &attended, full_tiles, first_head, 8usize,
        );
    }
}

/// Writes one of the two rows of an output, divided by its sum, and its rounding error if requested.
#[cube]
fn write_output<O: Float, N: Size>(
    outputs: &mut Outputs<O>,
    acc: &Vector<f32, N>,
    row: &RowToWrite,
    #[comptime] lower: usize,
    #[comptime] bp: MmaBlueprint,
) {
    let out = &mut outputs.out;
    #[comptime]
    match &mut outputs.residual {
        ComptimeOption::Some(residual) => {
            write_row_exactly::<O, N>(out, residual, acc, row, lower, bp);
        }
        ComptimeOption::None => write_row::<O, N>(out, acc, row, lower, bp),
    }
}

#[cube]
fn scale_output<N: Size>(acc: &mut Vector<f32, N>, factors: &PerRow, #[comptime] bp: MmaBlueprint) {
    #[unroll]
    for n in 0..comptime!(bp.head_dim / 8) {
        #[unroll]
        for e in 0..2usize {
            let (at0, at1) = comptime!((n * 4 + e, n * 4 + 2 + e));
            acc.insert(at0, acc.extract(at0) * factors.upper);
            acc.insert(at1, acc.extract(at1) * factors.lower);
        }
    }
}
