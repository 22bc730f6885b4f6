//! The kernel for scores of a few tokens.

use crate::math::softplus;
use cubecl::prelude::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ZohBlueprint {
    pub units: usize,
    /// True if there is a bias; also among the kernel's options, but CubeCL's disk cache does not see those, see
    /// `docs/upstream.md`.
    pub bias: bool,
}

/// `exp(a * softplus(values . dt_projᵀ + bias))`, in f32.
///
/// | buffer | layout |
/// |---|---|
/// | `values` | `[batch, heads, len, head_dim]`, any strides |
/// | `dt_proj` | contiguous `[heads, heads * head_dim]` |
/// | `bias`, `a` | contiguous `[heads]` |
/// | `out` | contiguous `[batch, heads, len]`, overwritten |
///
/// A cube owns one score: cube x is the token, over all sequences, y the head. Its units share the features of the token's
/// values in all heads, and the first one adds their sums in order.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn zoh_scores_kernel<E: Float, P: Float, N: Size>(
    values: &Tensor<Vector<E, N>>,
    dt_proj: &[Vector<P, N>],
    bias: &ComptimeOption<Box<[P]>>,
    a: &[P],
    out: &mut [f32],
    #[comptime] bp: ZohBlueprint,
    #[define(E)] _element: ElemType,
    #[define(P)] _parameters: ElemType,
) {
    let size = N::value().comptime();
    let (heads, len, head_dim) = (values.shape(1), values.shape(2), values.shape(3));
    let (batch, token) = (CUBE_POS_X as usize / len, CUBE_POS_X as usize % len);
    let head = CUBE_POS_Y as usize;
    let width = heads * head_dim;
    let first = batch * values.stride(0) + token * values.stride(2);
    let mut sum = 0.0f32;
    let mut feature = UNIT_POS as usize * size;
    while feature < width {
        let at = first + feature / head_dim * values.stride(1) + feature % head_dim;
        let value = Vector::<f32, N>::cast_from(values[at / size]);
        let weight = Vector::<f32, N>::cast_from(dt_proj[(head * width + feature) / size]);
        #[unroll]
        for e in 0..size {
            sum = fma(value.extract(e), weight.extract(e), sum);
        }
        feature += comptime!(bp.units) * size;
    }
    let mut sums = Shared::<[f32]>::new_slice(comptime!(bp.units));
    sums[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS == 0 {
        let mut step = sums[0];
        for unit in 1..comptime!(bp.units) {
            step += sums[unit];
        }
        #[comptime]
        match bias {
            ComptimeOption::Some(bias) => step += f32::cast_from(bias[head]),
            ComptimeOption::None => {}
        }
        let score = (f32::cast_from(a[head]) * softplus(step)).exp();
        out[(batch * heads + head) * len + token] = score;
    }
}
