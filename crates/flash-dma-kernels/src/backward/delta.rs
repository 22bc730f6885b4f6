//! The row sums (`delta`) that the softmax gradient subtracts.

use crate::matrix::ptx::shuffle_xor;
use crate::vectors::Chunk;
use cubecl::prelude::*;

/// Lanes that share a row; together they read 128 contiguous bytes at once.
pub(crate) const ROW_LANES: usize = 8;
/// Rows of a cube of 256 units.
pub(crate) const CUBE_ROWS: usize = 256 / ROW_LANES;

/// `delta = sum over d of grad_out * out, minus grad_lse`: eight lanes per query row.
///
/// `out` and `grad_out` are `[batch, q_heads, q_len, head_dim]`, strides and start at multiples of 16 bytes; `grad_lse`
/// (read if `has_grad_lse`), `lse` and `delta` (overwritten) are contiguous `[batch, q_heads, q_len]`. If `for_boxes`,
/// `rows`, `[batch, q_heads, q_len rounded up to an even number]`, is overwritten too: `-log2(e) lse` and `delta` side
/// by side.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn delta_mma_kernel<E: Float>(
    out: &Tensor<Chunk<E>>,
    grad_out: &Tensor<Chunk<E>>,
    grad_lse: &[f32],
    lse: &[f32],
    delta: &mut [f32],
    rows: &mut [Vector<f32, Const<2>>],
    #[comptime] head_dim: usize,
    #[comptime] has_grad_lse: bool,
    #[comptime] for_boxes: bool,
    #[define(E)] _element: ElemType,
) {
    let chunks = comptime!(head_dim / 8);
    let lane = UNIT_POS as usize % ROW_LANES;
    let row = CUBE_POS_X as usize * CUBE_ROWS + UNIT_POS as usize / ROW_LANES;
    let (heads, q_len) = (out.shape(1), out.shape(2));
    let valid = row < out.shape(0) * heads * q_len;
    let mut sum = 0.0f32;
    if valid {
        let (query, head, batch) = (row % q_len, row / q_len % heads, row / q_len / heads);
        let at = (batch * out.stride(0) + head * out.stride(1) + query * out.stride(2)) / 8;
        let grad_at =
            (batch * grad_out.stride(0) + head * grad_out.stride(1) + query * grad_out.stride(2))
                / 8;
        #[unroll]
        for step in 0..comptime!(chunks.div_ceil(ROW_LANES)) {
            let chunk = lane + step * ROW_LANES;
            if chunk < chunks {
                let o = Vector::<f32, Const<8>>::cast_from(out[at + chunk]);
                let g = Vector::<f32, Const<8>>::cast_from(grad_out[grad_at + chunk]);
                #[unroll]
                for e in 0..8usize {
                    sum += o.extract(e) * g.extract(e);
                }
            }
        }
    }
    sum += shuffle_xor(sum, 4u32);
    sum += shuffle_xor(sum, 2u32);
    sum += shuffle_xor(sum, 1u32);
    if valid && lane == 0 {
        if comptime!(has_grad_lse) {
            sum -= grad_lse[row];
        }
        delta[row] = sum;
        if comptime!(for_boxes) {
            let mut pair = Vector::<f32, Const<2>>::new(sum);
            pair.insert(0usize, -lse[row] * comptime!(core::f32::consts::LOG2_E));
            rows[row / q_len * (q_len.div_ceil(2) * 2) + row % q_len] = pair;
        }
    }
}
