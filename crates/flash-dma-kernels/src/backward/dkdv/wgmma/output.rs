//! Writes the gradients of keys.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::{
    BackwardInputs, GradientRows, KeyGradients, KeyTileSource,
};
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::keys::is_shared;
use crate::backward::dkdv::shared::queries::Pairs;
use crate::backward::dkdv::shared::sums::write_score;
use crate::backward::dkdv::wgmma::keys::LaneKeys;
use crate::backward::dkdv::wgmma::weights::StepWeights;
use crate::backward::repair::repair_key;
use crate::matrix::fragment::quad_sum;
use crate::matrix::stages::RowAddress;
use crate::pattern::intervals::classes::QueryChunks;
use cubecl::prelude::*;

/// Writes or adds the rows of this lane's two keys, dK times `scale`; `quad` is the lane within its quad.
#[cube]
pub(crate) fn write_rows<O: Float, N: Size>(
    dv: &Vector<f32, N>,
    dk: &Vector<f32, N>,
    source: &KeyTileSource,
    chunks: &QueryChunks,
    keys: &LaneKeys,
    quad: usize,
    grads: &mut KeyGradients<O>,
    scale: f32,
) {
    let bp = comptime!(keys.bp);
    #[unroll]
    for lower in 0..2usize {
        let key = if comptime!(lower == 0) {
            &keys.upper
        } else {
            &keys.lower
        };
        if key.valid {
            let shared = is_shared(source, chunks, key.row, bp);
            let at = key.row * comptime!(bp.head_dim / 2) + quad;
            // One branch around all stores instead of one at each.
            if comptime!(bp.shared_keys) && shared {
                write_row::<O, N>(&mut grads.v, dv, at, 1.0f32, true, lower, bp);
                write_row::<O, N>(&mut grads.k, dk, at, scale, true, lower, bp);
            } else {
                write_row::<O, N>(&mut grads.v, dv, at, 1.0f32, false, lower, bp);
                write_row::<O, N>(&mut grads.k, dk, at, scale, false, lower, bp);
            }
        }
    }
}

/// Writes, or adds if `shared`, `factor` times one of the two rows whose elements this lane holds.
#[cube]
fn write_row<O: Float, N: Size>(
    grad: &mut GradientRows<O>,
    acc: &Vector<f32, N>,
    at: usize,
    factor: f32,
    #[comptime] shared: bool,
    #[comptime] lower: usize,
    #[comptime] bp: DkdvBlueprint,
) {
    #[unroll]
    for c in 0..comptime!(bp.segments()) {
        let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
        #[unroll]
        for e in 0..2usize {
            let x: f32 = acc.extract(comptime!(c * 4 + lower * 2 + e));
            pair.insert(e, x * factor);
        }
        grad.write(at + comptime!(c * 4), pair, shared, bp);
    }
}

/// Writes or adds the gradients of the scores of this lane's two keys.
#[cube]
pub(crate) fn write_scores<NP: Size>(
    weights: &StepWeights<NP>,
    keys: &LaneKeys,
    grad: &mut ComptimeOption<Box<[f32]>>,
) {
    let grad = grad.as_mut().unwrap();
    let dz0 = quad_sum(weights.dz0);
    let dz1 = quad_sum(weights.dz1);
    let quad = UNIT_POS_X as usize % 4;
    if quad == 0 {
        if keys.upper.valid {
            write_score(grad, keys.upper.row, dz0, comptime!(keys.bp));
        }
        if keys.lower.valid {
            write_score(grad, keys.lower.row, dz1, comptime!(keys.bp));
        }
    }
}

/// Adds the bias gradients of this lane's two keys for head `head`, to which no other cube adds, and resets them.
#[cube]
pub(crate) fn add_bias_gradients<O: Float, NP: Size>(
    weights: &mut StepWeights<NP>,
    keys: &LaneKeys,
    place: &ChunkTile,
    pairs: &Pairs,
    grads: &mut KeyGradients<O>,
    head: usize,
) {
    let of_all = place.batch * place.sizes.q_heads + pairs.rows.head + head;
    let grad = grads.scores.as_mut().unwrap();
    let row = of_all * place.sizes.k_len;
    let dz0 = quad_sum(weights.dz0);
    let dz1 = quad_sum(weights.dz1);
    weights.dz0 = 0.0f32;
    weights.dz1 = 0.0f32;
    let quad = UNIT_POS_X % 4;
    if quad == 0 {
        if keys.upper.valid {
            grad[row + keys.upper.key] += dz0;
        }
        if keys.lower.valid {
            grad[row + keys.lower.key] += dz1;
        }
    }
}

/// Adds to the gradients of this lane's two keys the contributions of the zeroed elements of dO and Q.
#[cube]
pub(crate) fn repair_keys<E: Float, O: Float>(
    inputs: &BackwardInputs<E>,
    source: &KeyTileSource,
    chunks: &QueryChunks,
    keys: &LaneKeys,
    place: &ChunkTile,
    pairs: &Pairs,
    grads: &mut KeyGradients<O>,
) {
    let bp = comptime!(keys.bp);
    let k_rows = RowAddress::of::<E>(&inputs.k, place.batch, place.kv_head);
    let of_upper = is_shared(source, chunks, keys.upper.row, bp);
    let of_lower = is_shared(source, chunks, keys.lower.row, bp);
    #[unroll]
    for lower in 0..2usize {
        let (key, shared) = if comptime!(lower == 0) {
            (&keys.upper, of_upper)
        } else {
            (&keys.lower, of_lower)
        };
        repair_key::<E, O>(inputs, key, shared, &k_rows, pairs, &mut grads.v, true);
        repair_key::<E, O>(inputs, key, shared, &k_rows, pairs, &mut grads.k, false);
    }
}
