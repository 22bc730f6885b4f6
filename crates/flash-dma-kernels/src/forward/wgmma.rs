//! Forward attention on Hopper's tensor cores: `wgmma` over key tiles that `cp.async` gathers.

use crate::args::Scaling;
use crate::matrix::args::{KeySource, LaunchedTiles, Operands, Outputs};
use crate::matrix::attended::AttendedKeys;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::dropout::lane_mask;
use crate::matrix::key_stream::KeyCopies;
use crate::matrix::logits::visible_logits;
use crate::matrix::query_tile::{copy_queries, first_output_head};
use crate::matrix::repair::{add_not_finite, zero_not_finite};
use crate::matrix::rows::{CubeTile, OutputRows, RowPair};
use crate::matrix::softmax::{Columns, OnlineSoftmax, PerRow};
use crate::matrix::stages::Stages;
use crate::matrix::tile_keys::TileKeys;
use crate::matrix::wgmma::panel::{Panels, publish};
use crate::matrix::wgmma::product::{finish, start_nt, start_pv};
use crate::matrix::wgmma::ring::{Ring, Turns};
use crate::matrix::wgmma::rows::{RowToWrite, write_row, write_row_exactly};
use crate::vectors::Segment;
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
    let (element, head_dim, key_tile) = comptime!((bp.element, bp.head_dim, bp.key_tile));
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
    let turns = Turns::new();
    let ring = Ring::new(bp.stages, comptime!(bp.fillers()), comptime!(bp.units()));
    let mut copies = KeyCopies::new::<E, Const<8>>(operands, source, &attended, &stages);
    // A stage is filled again `lag` tiles behind its use: two let a product with V stay under way until
    // the next tile's logits are there.
    let lag = comptime!(if bp.stages == 2 { 1usize } else { 2 });
    let ahead = comptime!(bp.stages - lag);
    #[unroll]
    for tile in 0..ahead {
        if tile < tiles {
            copies.fill::<E>(&ring, source, &attended, tile, &mut stages);
        }
    }
    for tile in 0..tiles {
        let boundary = tile >= full_tiles;
        let stage = tile % comptime!(bp.stages);
        let begin = stage * comptime!(bp.key_tile * bp.segments());
        let k_tile = k_panels.behind(begin);
        let v_tile = v_panels.behind(begin);
        ring.wait_full(stage, tile / comptime!(bp.stages));
        publish();
        if attended.may_hide_not_finite(boundary) {
            if zero_not_finite::<E>(&mut stages.v, tile, true, bp) {
                not_finite[0] = 1u32;
            }
            publish();
            // Makes the other units' zeros visible.
            sync_cube();
        }
        // S = Q K^T.
        turns.wait(tile, comptime!(bp.warps / 4));
        let products = start_nt::<NS>(&own_queries, &k_tile, element, key_tile, head_dim);
        turns.pass(tile, tiles, comptime!(bp.warps / 4));
        if tile + ahead < tiles {
            copies.fill::<E>(&ring, source, &attended, tile + ahead, &mut stages);
        }
        // In flight while the tensor cores multiply.
        let seen = (attended.mask).words_of_pair::<E>(&stages, &rows, tile, boundary, bp);
        let products = finish::<NS>(products, comptime!(bp.key_tile / 2));
        if comptime!(lag == 2) {
            acc = finish::<NO>(acc, comptime!(bp.output_elements()));
            if tile > 0 {
                ring.arrive_empty((tile - 1) % comptime!(bp.stages));
            }
        }
        let mut s = visible_logits::<E, NS>(
            &products, &stages, source, &attended, &rows, &seen, tile, boundary,
        );
        let mut maxima = softmax.maxima();
        maxima.raise_to::<NS>(&s, key_tile);
        if softmax.outgrown(&mut maxima) {
            let factors = softmax.rescale(&maxima);
            scale_output::<NO>(&mut acc, &factors, bp);
            softmax.rebase::<NS>(&mut s, key_tile);
        }
        let references = softmax.references();
        softmax.note_tops(&maxima);
        let words = &stages.columns;
        let columns = comptime!(Columns::first(bp.key_tile));
        let p =
            softmax.probabilities::<NS, NP>(&s, &references, &mask, words, tile, columns, element);
        // O += P V.
        acc = start_pv::<NO, NP>(acc, p, &v_tile, element, head_dim, key_tile);
        if comptime!(lag == 1) {
            acc = finish::<NO>(acc, comptime!(bp.output_elements()));
            ring.arrive_empty(stage);
        }
    }
    if comptime!(lag == 2) {
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
