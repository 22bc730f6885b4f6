//! The row sums (`delta`) that the softmax gradient subtracts.

use crate::args::Saved;
use crate::host::check::{address_type, elem_type, vector_size};
use crate::host::scratch::{one_unit_each, scratch};
use crate::row_sums::{RowSums, SumTerms, rest_or_zeros};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// `delta = sum over d of grad_out * (out + residual), minus grad_lse`: one unit per query row.
///
/// `out`, `residual` and `grad_out` are `[batch, q_heads, q_len, head_dim]` with any strides and a contiguous last
/// axis; `grad_lse` and `delta` (overwritten) are contiguous `[batch, q_heads, q_len]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn delta_kernel<F: Float, N: Size>(
    out: &Tensor<Vector<F, N>>,
    residual: &ComptimeOption<OwnedTensor<Vector<F, N>>>,
    grad_out: &Tensor<Vector<F, N>>,
    grad_lse: &ComptimeOption<OwnedTensor<f32>>,
    delta: &mut Tensor<f32>,
    #[comptime] terms: SumTerms,
    #[define(F)] _element: ElemType,
) {
    let row = ABSOLUTE_POS;
    let (heads, q_len) = (out.shape(1), out.shape(2));
    if row >= out.shape(0) * heads * q_len {
        terminate!();
    }
    let size = out.vector_size().comptime();
    let (query, head, batch) = (row % q_len, row / q_len % heads, row / q_len / heads);
    let at = (batch * out.stride(0) + head * out.stride(1) + query * out.stride(2)) / size;
    let grad_at =
        (batch * grad_out.stride(0) + head * grad_out.stride(1) + query * grad_out.stride(2))
            / size;
    let mut sum = 0.0f32;
    for vector in 0..comptime!(terms.head_dim / size) {
        let o = out[at + vector];
        let g = grad_out[grad_at + vector];
        #[unroll]
        for e in 0..size {
            sum += f32::cast_from(o.extract(e)) * f32::cast_from(g.extract(e));
        }
        #[comptime]
        match residual {
            ComptimeOption::Some(residual) => {
                let at = (batch * residual.stride(0)
                    + head * residual.stride(1)
                    + query * residual.stride(2))
                    / size;
                let r = residual[at + vector];
                #[unroll]
                for e in 0..size {
                    sum += f32::cast_from(r.extract(e)) * f32::cast_from(g.extract(e));
                }
            }
            ComptimeOption::None => {}
        }
    }
    #[comptime]
    match grad_lse {
        ComptimeOption::Some(grad_lse) => sum -= grad_lse[row],
        ComptimeOption::None => {}
    }
    delta[row] = sum;
}

impl RowSums {
    /// Launches the portable kernel.
    pub(crate) fn portable(client: &Client, problem: &Problem, saved: &Saved) -> Self {
        let delta = scratch(client, problem.lse_shape());
        let rows = problem.lse_shape().iter().product();
        let (cube_count, cube_dim) = one_unit_each(client, rows);
        let size = problem.element.size();
        let typed: Vec<_> = saved.rows().collect();
        let residual = saved.residual.clone().map(TensorBinding::into_tensor_arg);
        let grad_lse = saved.grad_lse.clone().map(TensorBinding::into_tensor_arg);
        // SAFETY: units past the rows return; the buffers were checked to hold what is indexed.
        unsafe {
            delta_kernel::launch_unchecked(
                client,
                cube_count,
                cube_dim,
                address_type(&typed, size).max(address_type(&[&delta], 4)),
                vector_size(&typed, size),
                saved.out.clone().into_tensor_arg(),
                residual.into(),
                saved.grad_out.clone().into_tensor_arg(),
                grad_lse.into(),
                delta.clone().into_tensor_arg(),
                SumTerms::new(problem.head_dim, saved, false, false),
                elem_type(problem.element),
            );
        }
        let lse_rest = rest_or_zeros(client, problem, saved);
        Self { delta, lse_rest }
    }
}
