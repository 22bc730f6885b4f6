//! Merges the outputs of parts of the keys.

use crate::args::Outputs;
use crate::host::check::{address_type, elem_type};
use crate::host::scratch::one_unit_each;
use crate::math::rounding_loss;
use crate::matrix::query_tile::RowOrder;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// Sizes of a launch of [`merge_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct MergedSizes {
    parts: usize,
    /// Query heads.
    heads: usize,
    /// Queries per head.
    len: usize,
    /// Rows of all sequences and heads.
    rows: usize,
    /// Pairs of elements of a row.
    pairs: usize,
}

/// A unit owns two neighbouring elements of a row of `out`, and the first unit of a row the row's `lse`:
///
/// `lse = log sum_p exp(lse_p)`, `out = sum_p exp(lse_p - lse) out_p`, in the order of the parts.
///
/// | buffer | layout |
/// |---|---|
/// | `part_out` | contiguous `[parts, rows, 2 * pairs]`, each row of a part divided by that part's own sum |
/// | `part_lse` | contiguous `[parts, rows]`, -inf where a row attends to none of the part's keys |
/// | `out` | `[sequences, heads, queries, 2 * pairs]` in the given order of rows, overwritten |
/// | `residual` | as `out`: what its rounding loses |
/// | `lse` | contiguous `[rows]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
fn merge_kernel<E: Float>(
    part_out: &[Vector<f32, Const<2>>],
    part_lse: &[f32],
    out: &mut [Vector<E, Const<2>>],
    residual: &mut ComptimeOption<Box<[Vector<E, Const<2>>]>>,
    lse: &mut [f32],
    order: &RowOrder,
    sizes: &MergedSizes,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    let (rows, pairs, parts) = (sizes.rows, sizes.pairs, sizes.parts);
    if at >= rows * pairs {
        terminate!();
    }
    let (row, column) = (at / pairs, at % pairs);
    let none = f32::new(f32::NEG_INFINITY);
    let mut greatest = none;
    for part in 0..parts {
        greatest = max(greatest, part_lse[part * rows + row]);
    }
    // All values are -inf, or NaN besides: any finite reference works.
    let reference = select(greatest == none, 0.0f32, greatest);
    let mut sum = 0.0f32;
    let mut value = Vector::<f32, Const<2>>::new(0.0f32);
    for part in 0..parts {
        let weight = (part_lse[part * rows + row] - reference).exp();
        sum += weight;
        value += Vector::new(weight) * part_out[part * rows * pairs + at];
    }
    // No key in any part: zeros and an LSE of -inf. NaN stays NaN.
    let empty = sum == 0.0f32;
    let mut result = Vector::<f32, Const<2>>::new(0.0f32);
    if !empty {
        result = value / Vector::new(sum);
    }
    let (heads, len) = (sizes.heads, sizes.len);
    let first = row / (heads * len) * heads * len;
    let to = order.place(first, row / len % heads, row % len) * pairs + column;
    out[to] = Vector::cast_from(result);
    #[comptime]
    match residual {
        ComptimeOption::Some(residual) => {
            let mut loss = Vector::<f32, Const<2>>::new(0.0f32);
            #[unroll]
            for e in 0..2usize {
                loss.insert(e, rounding_loss::<E>(result.extract(e)));
            }
            residual[to] = Vector::cast_from(loss);
        }
        ComptimeOption::None => {}
    }
    if column == 0 {
        lse[row] = select(empty, none, reference + sum.ln());
    }
}

/// Combines `parts` outputs of the queries of `problem`, `part_out` (`[parts, batch, q_heads, q_len, head_dim]`)
/// and `part_lse` (`[parts, batch, q_heads, q_len]`), into `outputs`. The head dimension must be even; the first two are
/// contiguous and f32.
pub(crate) fn merge(
    client: &Client,
    problem: &Problem,
    parts: usize,
    [part_out, part_lse]: [TensorBinding; 2],
    outputs: &Outputs,
) {
    let Outputs { out, residual, lse } = outputs.clone();
    let rows = problem.batch * problem.q_heads * problem.q_len;
    let pairs = problem.head_dim / 2;
    let (cubes, cube_dim) = one_unit_each(client, rows * pairs);
    let order = RowOrder::of(&out);
    let address = address_type(&[&out], problem.element.size());
    // SAFETY: units past the outputs return; the parts hold `parts` times the rows of the outputs.
    unsafe {
        merge_kernel::launch_unchecked(
            client,
            cubes,
            cube_dim,
            address.max(address_type(
                &[&part_out, &part_lse, &lse],
                size_of::<f32>(),
            )),
            part_out.into_buffer_arg(),
            part_lse.into_buffer_arg(),
            out.into_buffer_arg(),
            residual.map(TensorBinding::into_buffer_arg).into(),
            lse.into_buffer_arg(),
            order,
            MergedSizesLaunch::new(parts, problem.q_heads, problem.q_len, rows, pairs),
            elem_type(problem.element),
        );
    }
}
