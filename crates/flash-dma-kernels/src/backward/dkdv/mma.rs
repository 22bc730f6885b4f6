//! The gradients of k, v and the scores on tensor cores: key tiles stream the queries of a chunk.

pub(crate) mod keys;
pub(crate) mod output;
pub(crate) mod queries;
pub(crate) mod roles;
pub(crate) mod warp;
pub(crate) mod weights;

use crate::args::Scaling;
use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::mma::keys::LaneKeys;
use crate::backward::dkdv::mma::output::{repair_keys, write_rows, write_scores};
use crate::backward::dkdv::mma::queries::{Tiles, copy_step, enter_alibi};
use crate::backward::dkdv::mma::roles::stream_queries;
use crate::backward::dkdv::mma::warp::WarpSums;
use crate::backward::dkdv::shared::args::{BackwardInputs, KeyGradients, KeyGrid, KeyTileSource};
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::dropout::enter_columns;
use crate::backward::dkdv::shared::keys::copy_keys;
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::backward::dkdv::shared::queries::Pairs;
use crate::backward::dkdv::shared::steps::StepOrder;
use crate::matrix::ptx::commit_copies;
use cubecl::prelude::*;

/// One cube owns one key tile of one chunk of queries: tile `CUBE_POS_X % grid.tiles` of chunk
/// `CUBE_POS_X / grid.tiles % grid.chunks` of kv head `CUBE_POS_X / grid.tiles / grid.chunks`, counted over all
/// sequences. It streams the queries of the chunk that attend to its keys, of every head of the group, and holds dK, dV
/// and dz of its keys in registers; see [`roles`].
///
/// | buffer | layout |
/// |---|---|
/// | `inputs.q`, `inputs.grad_out`, `k`, `v` | `[batch, heads, len, head_dim]`, strides and begin in steps of 16 bytes |
/// | `inputs.lse`, `inputs.delta` | contiguous `[batch, q_heads, q_len]` |
/// | `source` | see [`KeyTileSource`] |
/// | `grads.k`, `grads.v` | see [`KeyGradients`], `[batch, kv_heads, k_len, head_dim]`; with `bp.parts` see [`KeyParts`](crate::backward::dkdv::shared::gather::KeyParts) |
/// | `grads.scores` | contiguous `[batch, kv_heads, k_len]`, likewise; sparse only |
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
    let warp = UNIT_POS_Y as usize;
    let place = ChunkTile::of_cube::<E>(inputs, source, grid, bp);
    let mut tiles = Tiles::<E>::new(bp);
    tiles.bounds.enter(source, &place, bp);
    enter_columns(&mut tiles.columns, &scaling.dropout, source, &place, bp);
    enter_alibi::<E>(&mut tiles, inputs, source, &place, bp);
    sync_cube();

    let order = StepOrder::of_cube(source, grid, &place, &tiles.bounds, bp);
    let mask = if comptime!(bp.pattern.is_planned() || bp.pattern.has_head_bias()) {
        let first = place.start + warp % comptime!(bp.role_warps) * comptime!(bp.warp_keys());
        KeyMask::new(source, &place, first, bp)
    } else {
        KeyMask::none()
    };
    let pairs = Pairs::new::<E>(inputs, &place, mask, scaling, bp);
    let size!(NS) = comptime!(bp.products().values());
    let size!(NO) = comptime!(bp.sums().values());
    let size!(NA) = comptime!(4 * bp.fragments);
    let mut sums = WarpSums::<NS, NO>::new(bp);
    let mut not_finite = false;
    if order.count > 0 {
        copy_keys::<E>(inputs, source, &place, &mut tiles.k, &mut tiles.v, bp);
        let first = order.first(bp);
        copy_step::<E>(inputs, &pairs.rows, &first, 0usize, &mut tiles, bp);
        commit_copies();
        let keys = LaneKeys::new(source, &place, &pairs);
        let scores = &mut grads.scores;
        if warp < comptime!(bp.role_warps) {
            not_finite = stream_queries::<E, NS, NO, NA>(
                inputs, &pairs, &order, &mut tiles, &keys, &mut sums, scores, true,
            );
        } else {
            not_finite = stream_queries::<E, NS, NO, NA>(
                inputs, &pairs, &order, &mut tiles, &keys, &mut sums, scores, false,
            );
        }
    }

    let gradients = &sums.gradients;
    let chunks = place.chunks(grid);
    if warp < comptime!(bp.role_warps) {
        write_rows::<O, NO>(source, &chunks, &place, gradients, &mut grads.v, 1.0f32, bp);
        if not_finite {
            repair_keys::<E, O>(inputs, source, &chunks, &place, &pairs, &mut grads.v, true);
        }
    } else {
        let scale = scaling.scale;
        write_rows::<O, NO>(source, &chunks, &place, gradients, &mut grads.k, scale, bp);
        if not_finite {
            repair_keys::<E, O>(inputs, source, &chunks, &place, &pairs, &mut grads.k, false);
        }
        if comptime!(bp.pattern.has_shared_score()) {
            write_scores(source, &place, &sums.scores, &mut grads.scores, bp);
        }
    }
}
