//! Writes the gradients of keys.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::keys::OwnKey;
use crate::backward::dkdv::shared::sums::add_to;
use crate::backward::dkdv::wgmma::weights::StepWeights;
use crate::finite::is_finite;
use crate::matrix::fragment::quad_sum;
use crate::matrix::ptx::value;
use crate::vectors::Chunk;
use cubecl::prelude::*;

/// Zeroes the elements of a stage of queries or output gradients that are not finite.
#[cube]
pub(crate) fn zero_not_finite<E: Float>(
    rows: &mut Shared<[Chunk<E>]>,
    stage: usize,
    #[comptime] bp: DkdvBlueprint,
) {
    let mut at = UNIT_POS as usize;
    while at < comptime!(bp.rows * bp.chunks()) {
        let place = stage * comptime!(bp.rows * bp.chunks()) + at;
        let mut values = rows[place];
        #[unroll]
        for e in 0..8usize {
            if !is_finite(f32::cast_from(values.extract(e))) {
                values.insert(e, E::from_int(0));
            }
        }
        rows[place] = values;
        at += comptime!(bp.units());
    }
}

/// Writes or adds `factor` times one of the two rows that this lane holds elements of.
#[cube]
pub(crate) fn write_row<O: Float, N: Size>(
    grad: &mut [Vector<O, Const<2>>],
    acc: &Vector<f32, N>,
    at: usize,
    factor: f32,
    #[comptime] lower: usize,
    #[comptime] bp: DkdvBlueprint,
) {
    #[unroll]
    for c in 0..comptime!(bp.chunks()) {
        let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
        #[unroll]
        for e in 0..2usize {
            let x: f32 = acc.extract(comptime!(c * 4 + lower * 2 + e));
            pair.insert(e, x * factor);
        }
        let to = at + comptime!(c * 4);
        if comptime!(bp.shared_keys) {
            add_pair::<O>(
                &mut grad[to..to + 1],
                pair.extract(0usize),
                pair.extract(1usize),
            );
        } else {
            grad[to] = Vector::cast_from(pair);
        }
    }
}

#[cube]
pub(crate) fn write_score(grad: &mut [f32], at: usize, sum: f32, #[comptime] bp: DkdvBlueprint) {
    if comptime!(bp.shared_keys) {
        add_to(&mut grad[at..at + 1], sum);
    } else {
        grad[at] = sum;
    }
}

/// Adds the score gradients of this lane's two keys to those of the row that begins at `row`, which no other cube adds
/// to, and resets them.
#[cube]
pub(crate) fn add_scores<NP: Size>(
    weights: &mut StepWeights<NP>,
    key0: &OwnKey,
    key1: &OwnKey,
    grad: &mut [f32],
    row: usize,
) {
    let dz0 = quad_sum(weights.dz0);
    let dz1 = quad_sum(weights.dz1);
    weights.dz0 = 0.0f32;
    weights.dz1 = 0.0f32;
    let quad = UNIT_POS_X % 4;
    if quad == 0 {
        if key0.valid {
            grad[row + key0.key] += dz0;
        }
        if key1.valid {
            grad[row + key1.key] += dz1;
        }
    }
}

/// Adds to both elements of a pair of f32 in global memory.
#[cube]
fn add_pair<O: Float>(to: &mut [Vector<O, Const<2>>], x: f32, y: f32) {
    let p = unsafe { to.as_ptr_unchecked() };
    gpu_asm!(
        "{{ .reg .u64 g; cvta.to.global.u64 g, {p}; red.relaxed.gpu.global.add.v2.f32 [g], {{{x}, {y}}}; }}",
        p = mem_inout(_) p,
        x = in(_) value::<f32>(x),
        y = in(_) value::<f32>(y),
        options(explicit_mem)
    );
}
