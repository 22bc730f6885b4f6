//! Writes the gradients of a cube's keys.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::mma::keys::local_key;
use crate::backward::dkdv::shared::args::{BackwardInputs, KeyTileSource};
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::keys::{own_key, score_row};
use crate::backward::dkdv::shared::pairs::Pairs;
use crate::backward::dkdv::shared::sums::{add_pair, write_score};
use crate::backward::repair::repair_key;
use crate::matrix::fragment::quad_sum;
use crate::matrix::stages::RowAddress;
use cubecl::prelude::*;

/// Writes or adds `factor` times the accumulated rows of this warp's keys.
#[cube]
pub(crate) fn write_rows<O: Float, NO: Size>(
    source: &KeyTileSource,
    place: &ChunkTile,
    acc: &Array<Vector<f32, NO>>,
    grad: &mut [Vector<O, Const<2>>],
    factor: f32,
    #[comptime] bp: DkdvBlueprint,
) {
    let (lane, warp) = (
        UNIT_POS_X as usize,
        UNIT_POS_Y as usize % comptime!(bp.role_warps),
    );
    let left = place.count - place.start;
    #[unroll]
    for m in 0..comptime!(bp.fragments) {
        #[unroll]
        for lower in 0..2usize {
            let local = warp * comptime!(bp.warp_keys()) + comptime!(m * 16 + lower * 8) + lane / 4;
            if local < left {
                let row = place.row_of(source, local, bp) * comptime!(bp.head_dim / 2);
                let mut shared = comptime!(bp.shared_keys).runtime();
                if comptime!(bp.shared_keys) {
                    shared = !own_key(local, place, source, 0usize, false, bp).of_one_chunk;
                }
                #[unroll]
                for c in 0..comptime!(bp.segments()) {
                    let at = row + comptime!(c * 4) + lane % 4;
                    let (index, first) = comptime!(bp.sums().place(m, c));
                    let x = acc[index].extract(comptime!(first + lower * 2)) * factor;
                    let y = acc[index].extract(comptime!(first + lower * 2 + 1)) * factor;
                    if comptime!(bp.shared_keys) && shared {
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
    place: &ChunkTile,
    pairs: &Pairs,
    grad: &mut [Vector<O, Const<2>>],
    #[comptime] first_role: bool,
) {
    let bp = comptime!(pairs.bp);
    let k_rows = RowAddress::of::<E>(&inputs.k, place.batch, place.kv_head);
    let score_row = score_row(source, place, bp);
    for n in 0..comptime!(bp.fragments * 2) {
        let local = UNIT_POS_Y as usize % comptime!(bp.role_warps) * comptime!(bp.warp_keys())
            + n * 8
            + UNIT_POS_X as usize / 4;
        let own = own_key(
            local,
            place,
            source,
            score_row,
            comptime!(bp.pattern.has_shared_score()),
            bp,
        );
        repair_key::<E, O>(inputs, &own, &k_rows, pairs, grad, first_role);
    }
}
