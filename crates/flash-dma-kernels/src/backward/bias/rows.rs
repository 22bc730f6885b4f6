//! The gradient of a bias that all keys share.

use crate::args::Saved;
use crate::finite::{is_finite, negative_infinity};
use crate::host::scratch::{address_type, bytes, one_unit_each, scratch};
use crate::pattern::mask::query_lists::sum_heads;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// Parts of the sum of a head whose queries share a bias.
const PARTS: usize = 32;

/// Writes the gradient of a bias of `shape` that all keys share to `grad`, contiguous, f32, in that shape: the gradients
/// of the rows' LSE, summed over the sequences, heads and queries that share an element, in a fixed order. See
/// [`MaskedProblem::has_row_bias`](flash_dma_problem::MaskedProblem::has_row_bias).
///
/// `delta` are the row sums.
pub(crate) fn row_bias_gradient(
    client: &Client,
    problem: &Problem,
    saved: &Saved,
    delta: &TensorBinding,
    grad: &TensorBinding,
) {
    let [batch, heads, each] = parts_shape(problem, grad.shape[2]);
    let parts = scratch(client, [batch, heads, each]);
    let items = batch * heads * each;
    let (count, dim) = one_unit_each(client, items);
    let grad_lse = saved.grad_lse.clone();
    let has_grad_lse = grad_lse.is_some();
    // SAFETY: units past the parts return, and no row past the last of a head is read.
    unsafe {
        row_bias_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type([delta, &parts]),
            saved.lse.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            grad_lse.map(TensorBinding::into_buffer_arg).into(),
            parts.clone().into_buffer_arg(),
            problem.q_len,
            each,
            items,
            has_grad_lse,
        );
    }
    // The parts of heads that share an element are adjacent, as the heads themselves are.
    let mut parts = parts;
    if grad.shape[2] == 1 {
        parts.shape = [batch, heads * each, 1].into();
        parts.strides = [heads * each, 1, 1].into();
    }
    sum_heads(client, &parts, grad);
}

/// The shape of the sums that [`row_bias_gradient`] adds up, f32, for a bias of `queries` queries or one.
fn parts_shape(problem: &Problem, queries: usize) -> [usize; 3] {
    let parts = match queries {
        1 => problem.q_len.min(PARTS),
        all => all,
    };
    [problem.batch, problem.q_heads, parts]
}

/// The bytes that [`row_bias_gradient`] allocates.
pub(crate) fn row_bias_bytes(problem: &Problem, shape: [usize; 4]) -> usize {
    bytes(parts_shape(problem, shape[2]))
}

/// Adds up the gradients of the logits of each row, by head, in `each` parts: part `n` has the rows `n`, `n + each`, and so
/// on, in order. One unit per part.
///
/// `lse`, `delta` and `grad_lse` are contiguous `[batch, heads, q_len]`, `parts` is contiguous `[batch, heads, each]` and
/// overwritten. A row that sees nothing counts as zero, and one with a number that is not finite as NaN.
#[cube(launch_unchecked, address_type = "dynamic")]
fn row_bias_kernel(
    lse: &[f32],
    delta: &[f32],
    grad_lse: &ComptimeOption<Box<[f32]>>,
    parts: &mut [f32],
    q_len: usize,
    each: usize,
    items: usize,
    // Tells CubeCL's disk cache which of the two kernels this is, see `docs/upstream.md`.
    #[comptime] _has_grad_lse: bool,
) {
    let at = ABSOLUTE_POS;
    if at >= items {
        terminate!();
    }
    let first = at / each * q_len;
    let mut row = at % each;
    let mut sum = 0.0f32;
    while row < q_len {
        let mut own = 0.0f32;
        #[comptime]
        match grad_lse {
            ComptimeOption::Some(grad_lse) => own = grad_lse[first + row],
            ComptimeOption::None => {}
        }
        let lse = lse[first + row];
        let delta = delta[first + row];
        if lse == negative_infinity() {
            own = 0.0f32;
        } else if !is_finite(lse) || (!is_finite(delta) && is_finite(own)) {
            // NaN whatever the LSE is; WGSL refuses it as a constant.
            own = f32::reinterpret(u32::reinterpret(lse) | u32::new(comptime!(0x7fc0_0000i64)));
        }
        sum += own;
        row += each;
    }
    parts[at] = sum;
}
