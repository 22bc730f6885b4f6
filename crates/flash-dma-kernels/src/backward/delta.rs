//! The row sums (`delta`) that the softmax gradient subtracts.

use crate::dropout::{DropoutSeed, head_word, row_word};
use crate::matrix::logit_scale::scaled_lse;
use crate::matrix::ptx::shuffle_xor;
use crate::row_sums::SumTerms;
use crate::vectors::Segment;
use cubecl::prelude::*;

/// Lanes that share a row; together they read 128 contiguous bytes at once.
pub(crate) const ROW_LANES: usize = 8;
/// Rows of a cube of 256 units.
pub(crate) const CUBE_ROWS: usize = 256 / ROW_LANES;

/// The rows that `wgmma` kernels copy as boxes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BoxedRows {
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: Box<[f32]>,
    /// `[batch, q_heads, q_len rounded up to an even number]`, pairs of `-log2(e) lse` and `delta`; overwritten.
    pub rows: Box<[Vector<f32, Const<2>>]>,
}

/// The words of the rows in the dropout mask.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowWords {
    pub seed: DropoutSeed,
    /// `[batch, q_heads, stride]`; overwritten.
    pub words: Box<[u32]>,
    /// Words between heads, and the keys of a sequence.
    pub stride: u32,
    pub k_len: u32,
}

/// `delta = sum over d of grad_out * (out + residual), minus grad_lse`: eight lanes per query row, in the order in
/// which the rows of `out` lie in memory.
///
/// `out`, `residual` and `grad_out` are `[batch, q_heads, q_len, head_dim]`, strides and start at multiples of 16
/// bytes; `grad_lse` and `delta` (overwritten) are contiguous `[batch, q_heads, q_len]`. With dropout, the kernel also
/// writes the `words` of the rows.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn delta_mma_kernel<E: Float>(
    out: &Tensor<Segment<E>>,
    residual: &ComptimeOption<OwnedTensor<Segment<E>>>,
    grad_out: &Tensor<Segment<E>>,
    grad_lse: &ComptimeOption<Box<[f32]>>,
    delta: &mut [f32],
    boxed: &mut ComptimeOption<BoxedRows>,
    words: &mut ComptimeOption<RowWords>,
    #[comptime] terms: SumTerms,
    #[define(E)] _element: ElemType,
) {
    let segments = comptime!(terms.head_dim / 8);
    let lane = UNIT_POS as usize % ROW_LANES;
    let index = CUBE_POS_X as usize * CUBE_ROWS + UNIT_POS as usize / ROW_LANES;
    let (heads, q_len) = (out.shape(1), out.shape(2));
    let (batch, in_batch) = (index / (heads * q_len), index % (heads * q_len));
    let valid = batch < out.shape(0);
    let mut head = in_batch / q_len;
    let mut query = in_batch % q_len;
    if out.stride(1) < out.stride(2) {
        // Rows that are adjacent in memory are heads of one query.
        head = in_batch % heads;
        query = in_batch / heads;
    }
    let row = (batch * heads + head) * q_len + query;
    let mut sum = 0.0f32;
    if valid {
        let at = (batch * out.stride(0) + head * out.stride(1) + query * out.stride(2)) / 8;
        let grad_at =
            (batch * grad_out.stride(0) + head * grad_out.stride(1) + query * grad_out.stride(2))
                / 8;
        #[unroll]
        for step in 0..comptime!(segments.div_ceil(ROW_LANES)) {
            let segment = lane + step * ROW_LANES;
            if segment < segments {
                let o = Vector::<f32, Const<8>>::cast_from(out[at + segment]);
                let g = Vector::<f32, Const<8>>::cast_from(grad_out[grad_at + segment]);
                #[unroll]
                for e in 0..8usize {
                    sum += o.extract(e) * g.extract(e);
                }
                #[comptime]
                match residual {
                    ComptimeOption::Some(residual) => {
                        let at = (batch * residual.stride(0)
                            + head * residual.stride(1)
                            + query * residual.stride(2))
                            / 8;
                        let r = Vector::<f32, Const<8>>::cast_from(residual[at + segment]);
                        #[unroll]
                        for e in 0..8usize {
                            sum += r.extract(e) * g.extract(e);
                        }
                    }
                    ComptimeOption::None => {}
                }
            }
        }
    }
    sum += shuffle_xor(sum, 4u32);
    sum += shuffle_xor(sum, 2u32);
    sum += shuffle_xor(sum, 1u32);
    if valid && lane == 0 {
        #[comptime]
        match grad_lse {
            ComptimeOption::Some(grad_lse) => sum -= grad_lse[row],
            ComptimeOption::None => {}
        }
        delta[row] = sum;
        #[comptime]
        match boxed {
            ComptimeOption::Some(boxed) => {
                let mut pair = Vector::<f32, Const<2>>::new(sum);
                pair.insert(0usize, scaled_lse(boxed.lse[row], 0.0f32));
                boxed.rows[(batch * heads + head) * (q_len.div_ceil(2) * 2) + query] = pair;
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match words {
            ComptimeOption::Some(words) => {
                let head = batch * heads + head;
                let of_head = head_word(head, &words.seed);
                let word = row_word(of_head, query, q_len, words.k_len as usize);
                words.words[head * words.stride as usize + query] = word;
            }
            ComptimeOption::None => {}
        }
    }
}
