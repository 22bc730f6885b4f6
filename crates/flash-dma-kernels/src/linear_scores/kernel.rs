//! The kernels of linear scores. Tokens pass through memory once in each direction, where a product would read a copy of
//! them in f32.

use crate::linear_scores::blueprint::{GradientBlueprint, ScoresBlueprint};
use cubecl::prelude::*;

/// Numbers of tokens, of a sequence, in all, and of a part of the gradient's sums.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Tokens {
    pub len: usize,
    pub all: usize,
    pub part: usize,
    /// Vectors of a token.
    pub items: usize,
}

/// `out[b, h, t]` = token `t` of sequence `b` times direction `h`: a plane owns a token.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn linear_scores_kernel<E: Float, N: Size>(
    tokens: &[Vector<E, N>],
    directions: &[Vector<f32, N>],
    out: &mut [f32],
    sizes: Tokens,
    #[comptime] bp: ScoresBlueprint,
    #[define(E)] _element: ElemType,
) {
    let size = N::value().comptime();
    let lanes = comptime!(bp.team.lanes);
    let (mut plane, mut lane) = (UNIT_POS as usize, 0usize);
    if comptime!(lanes > 1) {
        plane = PLANE_POS as usize;
        lane = UNIT_POS_PLANE as usize;
    }
    let token = CUBE_POS * comptime!(bp.team.planes) + plane;
    if token < sizes.all {
        let mut sums = Array::<f32>::new(comptime!(bp.heads));
        #[unroll]
        for head in 0..comptime!(bp.heads) {
            sums[head] = 0.0f32;
        }
        let mut item = lane;
        while item < sizes.items {
            let x = Vector::<f32, N>::cast_from(tokens[token * sizes.items + item]);
            #[unroll]
            for head in 0..comptime!(bp.heads) {
                let products = x * directions[head * sizes.items + item];
                #[unroll]
                for e in 0..size {
                    sums[head] += products.extract(e);
                }
            }
            item += lanes;
        }
        let (sequence, place) = (token / sizes.len, token % sizes.len);
        #[unroll]
        for head in 0..comptime!(bp.heads) {
            let mut sum = sums[head];
            if comptime!(lanes > 1) {
                sum = plane_sum(sum);
            }
            if lane == 0 {
                out[(sequence * comptime!(bp.heads) + head) * sizes.len + place] = sum;
            }
        }
    }
}

/// `parts[p, h, ..]` = the sum of the tokens of part `p`, each times its gradient of head `h`: a unit owns a vector of
/// features, and adds up tokens in their order.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn linear_scores_gradient_kernel<E: Float, N: Size>(
    tokens: &[Vector<E, N>],
    grad_out: &[f32],
    parts: &mut [Vector<f32, N>],
    sizes: Tokens,
    #[comptime] bp: GradientBlueprint,
    #[define(E)] _element: ElemType,
) {
    let part = CUBE_POS_X as usize;
    let item = CUBE_POS_Y as usize * comptime!(bp.units) + UNIT_POS as usize;
    if item < sizes.items {
        let mut sums = Array::<Vector<f32, N>>::new(comptime!(bp.heads));
        #[unroll]
        for head in 0..comptime!(bp.heads) {
            sums[head] = Vector::new(0.0f32);
        }
        let first = part * sizes.part;
        let end = (first + sizes.part).min(sizes.all);
        for token in first..end {
            let x = Vector::<f32, N>::cast_from(tokens[token * sizes.items + item]);
            let (sequence, place) = (token / sizes.len, token % sizes.len);
            #[unroll]
            for head in 0..comptime!(bp.heads) {
                let at = (sequence * comptime!(bp.heads) + head) * sizes.len + place;
                sums[head] += x * Vector::new(grad_out[at]);
            }
        }
        #[unroll]
        for head in 0..comptime!(bp.heads) {
            parts[(part * comptime!(bp.heads) + head) * sizes.items + item] = sums[head];
        }
    }
}
