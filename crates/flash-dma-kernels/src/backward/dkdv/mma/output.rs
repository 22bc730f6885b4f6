//! Writes the gradients of a cube's keys.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::mma::keys::local_key;
use crate::backward::dkdv::shared::args::{BackwardInputs, GradientRows, KeyTileSource};
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::keys::{is_shared, own_key, score_row};
use crate::backward::dkdv::shared::queries::Pairs;
use crate::backward::dkdv::shared::sums::write_score;
use crate::backward::repair::repair_key;
use crate::matrix::fragment::quad_sum;
use crate::matrix::stages::RowAddress;
use crate::pattern::intervals::classes::QueryChunks;
use cubecl::prelude::*;

/// Writes or adds `factor` times the accumulated rows of this warp's keys.
#[cube]
pub(crate) fn write_rows<O: Float, NO: Size>(
    source: &KeyTileSource,
    chunks: &QueryChunks,
    place: &ChunkTile,
    acc: &Array<Vector<f32, NO>>,
    grad: &mut GradientRows<O>,
    factor: f32,
    #[comptime] bp: DkdvBlueprint,
) {
    let lane = UNIT_POS_X as usize;
    let warp = UNIT_POS_Y as usize % comptime!(bp.role_warps);
    let left = place.count - place.start;
    #[unroll]
    for m in 0..comptime!(bp.fragments) {
        #[unroll]
        for lower in 0..2usize {
            let local = warp * comptime!(bp.warp_keys()) + comptime!(m * 16 + lower * 8) + lane / 4;
            if local < left {
                let row = place.row_of(source, local, bp);
                let shared = is_shared(source, chunks, row, bp);
                let row = row * comptime!(bp.head_dim / 2);
                #[unroll]
                for c in 0..comptime!(bp.segments()) {
                    let at = row + comptime!(c * 4) + lane % 4;
                    let (index, first) = comptime!(bp.sums().place(m, c));
                    let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
                    #[unroll]
                    for e in 0..2usize {
                        let x = acc[index].extract(comptime!(first + lower * 2 + e));
                        pair.insert(e, x * factor);
                    }
                    grad.write(at, pair, shared, bp);
                }
            }
        }
    }
}

/// Writes or adds the gradients of the scores of this warp's keys.
#[cube]
pub(crate) fn write_scores(
    source: &KeyTileSource,
    place: &ChunkTile,
    sums: &Array<f32>,
    grad: &mut ComptimeOption<Box<[f32]>>,
    #[comptime] bp: DkdvBlueprint,
) {
    let grad = grad.as_mut().unwrap();
    let left = place.count - place.start;
    #[unroll]
    for n in 0..comptime!(bp.fragments * 2) {
        let sum = quad_sum(sums[n]);
        let local = local_key(n, bp);
        let quad = UNIT_POS_X as usize % 4;
        if quad == 0 && local < left {
            let at = place.row_of(source, local, bp);
            write_score(grad, at, sum, bp);
        }
    }
}

/// Adds the contributions of rows that are not finite to the gradients of this warp's keys, once they are written: to
/// dV in the first role, to dK in the second.
#[cube]
pub(crate) fn repair_keys<E: Float, O: Float>(
    inputs: &BackwardInputs<E>,
    source: &KeyTileSource,
    chunks: &QueryChunks,
    place: &ChunkTile,
    pairs: &Pairs,
    grad: &mut GradientRows<O>,
    #[comptime] first_role: bool,
) {
    let bp = comptime!(pairs.bp);
    let k_rows = RowAddress::of::<E>(&inputs.k, place.batch, place.kv_head);
    let score_row = score_row(source, place, bp);
    let scored = comptime!(bp.pattern.has_shared_score());
    for n in 0..comptime!(bp.fragments * 2) {
        let local = UNIT_POS_Y as usize % comptime!(bp.role_warps) * comptime!(bp.warp_keys())
            + n * 8
            + UNIT_POS_X as usize / 4;
        let own = own_key(local, place, source, score_row, scored, bp);
        let shared = is_shared(source, chunks, own.row, bp);
        repair_key::<E, O>(inputs, &own, shared, &k_rows, pairs, grad, first_role);
    }
}
