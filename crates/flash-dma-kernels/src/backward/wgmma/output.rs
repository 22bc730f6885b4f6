//! Where the gradients of keys go, and what rows that are not finite add to them.

use crate::backward::mma::{DkdvBlueprint, OwnKey, add_to, pick};
use crate::forward::mma::{LogitScale, RowAddress, exp_of};
use crate::tile::is_finite;
use crate::tile::mma::{Chunk, value};
use cubecl::prelude::*;

/// Zeroes the elements of a stage of queries or output gradients that are not finite.
#[cube]
pub(super) fn zero_not_finite<E: Float>(
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

/// Adds to dV of a key, in memory, what the elements of dO of one query that are not finite contribute, if
/// the query attends to the key. A lane adds to the elements that it has written. Rare, hence simple:
/// everything is read from global memory again.
#[cube]
pub(super) fn add_broken_row<E: Float, O: Float>(
    q: &Tensor<Chunk<E>>,
    k: &Tensor<Chunk<E>>,
    grad_out: &Tensor<Chunk<E>>,
    own: &OwnKey,
    k_rows: &RowAddress,
    q_at: usize,
    o_at: usize,
    query: usize,
    lse: f32,
    logit_scale: &LogitScale,
    grad_v: &mut [Vector<O, Const<2>>],
    #[comptime] bp: DkdvBlueprint,
) {
    if own.valid && own.first <= query as i32 && (query as i32) < own.end {
        let chunks = comptime!(bp.chunks());
        let quad = UNIT_POS_X as usize % 4;
        let k_at = k_rows.base + own.key * k_rows.stride;
        let mut product = 0.0f32;
        for c in 0..chunks {
            let (a, b) = (q[q_at + c], k[k_at + c]);
            #[unroll]
            for e in 0..8usize {
                product += f32::cast_from(a.extract(e)) * f32::cast_from(b.extract(e));
            }
        }
        let x = logit_scale.apply(product, own.score, bp.softcap);
        let weight = exp_of(x, -lse * comptime!(core::f32::consts::LOG2_E));
        for c in 0..chunks {
            let pair = pick::<E>(grad_out[o_at + c], quad);
            let (x, y) = (pair.extract(0usize), pair.extract(1usize));
            if !is_finite(x) || !is_finite(y) {
                let more_x = select(is_finite(x), 0.0f32, weight * x);
                let more_y = select(is_finite(y), 0.0f32, weight * y);
                let at = own.row * comptime!(bp.head_dim / 2) + c * 4 + quad;
                if comptime!(bp.shared_keys) {
                    add_pair::<O>(&mut grad_v[at..at + 1], more_x, more_y);
                } else {
                    let mut sum = Vector::<f32, Const<2>>::cast_from(grad_v[at]);
                    sum.insert(0usize, sum.extract(0usize) + more_x);
                    sum.insert(1usize, sum.extract(1usize) + more_y);
                    grad_v[at] = Vector::cast_from(sum);
                }
            }
        }
    }
}

/// Writes or adds `factor` times one of the two rows that this lane holds elements of.
#[cube]
pub(super) fn write_row<O: Float, N: Size>(
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
pub(super) fn write_score(grad: &mut [f32], at: usize, sum: f32, #[comptime] bp: DkdvBlueprint) {
    if comptime!(bp.shared_keys) {
        add_to(&mut grad[at..at + 1], sum);
    } else {
        grad[at] = sum;
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
