//! The gradient of q on Hopper's tensor cores: query tiles stream the keys they attend to.

use crate::args::Scaling;
use crate::backward::dq::repair::mark_row;
use crate::backward::dq::rows::LaneRows;
use crate::backward::dq::weights::{PlacedTile, TilePairs, tile_gradients};
use crate::backward::products::Products;
use crate::matrix::args::{KeySource, LaunchedTiles, Operands, SavedRows};
use crate::matrix::attended::AttendedKeys;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::key_stream::KeyCopies;
use crate::matrix::ptx::{commit_copies, uniform_bool, wait_copies};
use crate::matrix::query_tile::copy_queries;
use crate::matrix::repair::zero_not_finite;
use crate::matrix::rows::CubeTile;
use crate::matrix::stages::Stages;
use crate::matrix::tile_keys::TileKeys;
use crate::matrix::wgmma::key_boxes::{KeyBoxes, KeyMaps};
use crate::matrix::wgmma::panel::{Panels, publish};
use crate::matrix::wgmma::product::{finish, finish_but, start_nt, start_pv};
use crate::matrix::wgmma::ring::{Ring, Turns};
use crate::matrix::wgmma::rows::{RowToWrite, write_row};
use crate::vectors::Segment;
use cubecl::prelude::*;

/// `dq_mma_kernel` with `wgmma`: the same cube, buffers and order. A
/// warpgroup owns 64 rows of the query tile: their queries and output gradients lie in shared memory, their
/// dQ in its registers.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn dq_wgmma_kernel<E: Float>(
    operands: &Operands<E, Const<8>>,
    grad_out: &Tensor<Segment<E>>,
    source: &KeySource,
    saved: &SavedRows,
    grad_q: &mut [Vector<E, Const<2>>],
    scaling: &Scaling,
    maps: &KeyMaps<E>,
    tiles_of: &LaunchedTiles,
    #[comptime] bp: MmaBlueprint,
    #[define(E)] _element: ElemType,
) {
    let size!(NS) = comptime!(bp.key_tile / 2);
    let size!(NO) = comptime!(bp.head_dim / 2);
    let size!(NP) = comptime!(bp.key_tile / 4);
    let (element, head_dim, key_tile) = comptime!((bp.element, bp.head_dim, bp.key_tile));
    let as_boxes = maps.exist;
    let warp = UNIT_POS_Y as usize;
    let own = CubeTile::new::<E, Const<8>>(operands, source, tiles_of, bp);
    let keys = TileKeys::new(source, &own);

    // The rows of Q and dO, `[warpgroups, head_dim / 64, 64 rows, 64]`; rows without a query are zero.
    let tile_segments = comptime!(bp.tile_rows() * bp.segments());
    let mut q_tile = Shared::<[Segment<E>]>::new_aligned_slice(tile_segments, 1024usize);
    let mut o_tile = Shared::<[Segment<E>]>::new_aligned_slice(tile_segments, 1024usize);
    copy_queries::<E>(&operands.q, &mut q_tile, &own);
    copy_queries::<E>(grad_out, &mut o_tile, &own);

    let mut stages = Stages::<E>::new(bp);
    // True for a stage that has held boundary keys that are not finite.
    let mut not_finite = Shared::<[u32]>::new_slice(comptime!(bp.stages));
    if (UNIT_POS as usize) < comptime!(bp.stages) {
        not_finite[UNIT_POS as usize] = 0u32;
    }
    let attended = AttendedKeys::new::<E, Const<8>>(operands, source, scaling, own, keys);
    let own = &attended.own;
    let keys = &attended.keys;
    let first_row = warp / 4 * comptime!(64 * bp.segments());
    let q_panels = Panels::at::<E>(&q_tile[first_row..first_row + 1]);
    let o_panels = Panels::at::<E>(&o_tile[first_row..first_row + 1]);
    let k_panels = Panels::at::<E>(&stages.k[0..1]);
    let v_panels = Panels::at::<E>(&stages.v[0..1]);
    let rows = LaneRows::read::<E>(saved, source, scaling, &stages, own);

    let tiles = keys.tiles(bp);
    let mut copies = KeyCopies::new::<E, Const<8>>(operands, source, &attended, &stages);
    let boxes = KeyBoxes::new::<E>(maps, &stages, &attended, 0u32);
    let mut acc = Vector::<f32, NO>::new(0.0f32);
    let ahead = comptime!(bp.stages - 1);
    let turns = Turns::new();
    let ring = Ring::new(
        comptime!(bp.stages),
        comptime!(if as_boxes { 1 } else { bp.fillers() }),
        comptime!(bp.units()),
    );
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
    // After the first copies, which need not wait for the LSEs.
    let large = uniform_bool(rows.any_large());
    let plain_tiles = select(large, 0usize, keys.full_tiles(bp));
    // A separate loop for cubes with a large LSE, whose additional work would take time from every tile of the others.
    #[unroll]
    for pass in 0..2usize {
        let exact = comptime!(pass == 1);
        let runs = if comptime!(exact) { large } else { !large };
        if runs {
            let lses = rows.exact(saved);
            for tile in 0..tiles {
                let stage = tile % comptime!(bp.stages);
                let boundary = tile >= plain_tiles;
                let begin = stage * comptime!(bp.key_tile * bp.segments());
                let k_tile = k_panels.behind(begin);
                let v_tile = v_panels.behind(begin);
                ring.wait_full(stage, tile / comptime!(bp.stages));
                if comptime!(!as_boxes) {
                    publish(); // Boxes are the products' to read as they land.
                }
                let may_hide = attended.may_hide_not_finite(boundary);
                if may_hide {
                    if zero_not_finite::<E>(&mut stages.k, tile, false, bp) {
                        not_finite[stage] = 1u32;
                    }
                    sync_cube(); // Makes the other units' findings visible.
                }
                acc = finish::<NO>(acc, comptime!(bp.head_dim / 2));
                if tile > 0 {
                    // The stage of the previous tile, which the copies below refill.
                    ring.arrive_empty((tile + ahead) % comptime!(bp.stages));
                }
                turns.wait(tile, comptime!(bp.warps / 4)); // S = Q K^T, followed by dP = dO V^T.
                let s = start_nt::<NS>(&q_panels, &k_tile, element, key_tile, head_dim);
                let dp = start_nt::<NS>(&o_panels, &v_tile, element, key_tile, head_dim);
                turns.pass(tile, tiles, comptime!(bp.warps / 4));
                if tile + ahead < tiles {
                    let (next, to) = (tile + ahead, &mut stages);
                    boxes.fill_or_gather::<E>(&mut copies, &ring, source, &attended, next, to);
                }
                // The bits of a full tile were not copied, whatever it is computed as.
                let hides = tile >= keys.full_tiles(bp);
                let pairs =
                    TilePairs::<NS>::read::<E>(source, &attended, &stages, &rows.pair, tile, hides);
                let s = finish_but::<NS>(s, 1usize, comptime!(bp.key_tile / 2));
                let products = Products::<NS> { s, dp };
                let placed = PlacedTile {
                    index: tile,
                    boundary,
                };
                let ds = tile_gradients::<E, NS, NP>(
                    &products, &rows, &lses, &pairs, &stages, &attended, &placed, exact,
                );
                if may_hide && not_finite[stage] == 1u32 {
                    sync_cube(); // All warps have their logits: only the product with dS remains.
                    let _any = zero_not_finite::<E>(&mut stages.k, tile, true, bp);
                    publish();
                    sync_cube();
                }
                // dQ += dS K.
                acc = start_pv::<NO, NP>(acc, ds, &k_tile, element, head_dim, key_tile);
            }
            acc = finish::<NO>(acc, comptime!(bp.head_dim / 2));
        }
    }

    // A row without any logit above -inf has no gradient: its LSE is -inf, which shows in the value that the loop
    // keeps.
    let empty0 = rows.upper.reference == f32::new(f32::INFINITY);
    let empty1 = rows.lower.reference == f32::new(f32::INFINITY);
    let upper = RowToWrite {
        valid: rows.to.has_upper,
        row: rows.to.upper,
        factor: scaling.scale,
        empty: empty0,
    };
    let lower = RowToWrite {
        valid: rows.to.has_lower,
        row: rows.to.lower,
        factor: scaling.scale,
        empty: empty1,
    };
    write_row::<E, NO>(grad_q, &acc, &upper, 0usize, bp);
    write_row::<E, NO>(grad_q, &acc, &lower, 1usize, bp);

    sync_cube();
    let mut any = false;
    for stage in 0..comptime!(bp.stages) {
        any = any || not_finite[stage] == 1u32;
    }
    if any && (UNIT_POS as usize) < comptime!(bp.tile_rows()) {
        mark_row::<E>(operands, source, saved, grad_q, &attended, plain_tiles);
    }
}
