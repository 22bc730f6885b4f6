//! Merges the outputs of parts of the keys.

use crate::args::Outputs;
use crate::host::check::{address_type, elem_type};
use crate::host::scratch::one_unit_each;
use crate::math::{log_sum_rest, rounding_loss};
use crate::matrix::rows::RowOrder;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// Sizes of a launch of [`merge_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct MergedSizes {
    parts: usize,
    heads: usize,
    len: usize,
    /// Rows of all sequences and heads.
    rows: usize,
    pairs: usize,
}

/// The outputs of parts of the keys, with the rounding error of each part's LSE.
#[derive(CubeType, CubeLaunch)]
struct Parts {
    /// Contiguous `[parts, rows, 2 * pairs]`, each row of a part divided by that part's own sum.
    pub out: Box<[Vector<f32, Const<2>>]>,
    /// Contiguous `[parts, rows]`, -inf where a row attends to none of the part's keys.
    pub lse: Box<[f32]>,
    /// Shaped as `lse`.
    pub lse_rest: Box<[f32]>,
}

/// A unit owns two neighbouring elements of a row of `out`, and the first unit of a row also the row's `lse`:
///
/// `lse = log sum_p exp(lse_p)`, `out = sum_p exp(lse_p - lse) out_p`, in the order of the parts.
///
/// | buffer | layout |
/// |---|---|
/// | `of_parts` | see [`Parts`] |
/// | `out` | `[sequences, heads, queries, 2 * pairs]` in the given order of rows, overwritten |
/// | `residual` | the rounding error of `out`, in the same layout |
/// | `lse`, `lse_rest` | contiguous `[rows]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
fn merge_kernel<E: Float>(
    of_parts: &Parts,
    out: &mut [Vector<E, Const<2>>],
    residual: &mut ComptimeOption<Box<[Vector<E, Const<2>>]>>,
    lse: &mut [f32],
    lse_rest: &mut ComptimeOption<Box<[f32]>>,
    order: &RowOrder,
    sizes: &MergedSizes,
    // CubeCL's disk cache does not tell kernels apart by their optional arguments.
    #[comptime] _written: [bool; 2],
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
        greatest = max(greatest, of_parts.lse[part * rows + row]);
    }
    // All values are -inf or NaN: any finite reference works.
    let reference = select(greatest == none, 0.0f32, greatest);
    let mut sum = 0.0f32;
    let mut value = Vector::<f32, Const<2>>::new(0.0f32);
    for part in 0..parts {
        let of_row = part * rows + row;
        let weight = ((of_parts.lse[of_row] - reference) + of_parts.lse_rest[of_row]).exp();
        sum += weight;
        value += Vector::new(weight) * of_parts.out[part * rows * pairs + at];
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
        let row_lse = select(empty, none, reference + sum.ln());
        lse[row] = row_lse;
        #[comptime]
        match lse_rest {
            ComptimeOption::Some(rest) => {
                rest[row] = log_sum_rest(reference, sum.ln(), row_lse);
            }
            ComptimeOption::None => {}
        }
    }
}

/// Combines `of_parts`, the outputs of `parts` parts of the keys, into `outputs`. They are contiguous f32, with the parts as
/// a first axis, and have an `lse_rest`. The head dimension must be even.
pub(crate) fn merge(
    client: &Client,
    problem: &Problem,
    parts: usize,
    of_parts: Outputs,
    outputs: &Outputs,
) {
    let parts_rest = of_parts.lse_rest.expect("parts have both parts of an LSE");
    let Outputs {
        out,
        residual,
        lse,
        lse_rest,
    } = outputs.clone();
    let written = [residual.is_some(), lse_rest.is_some()];
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
                &[&of_parts.out, &of_parts.lse, &lse],
                size_of::<f32>(),
            )),
            PartsLaunch::new(
                of_parts.out.into_buffer_arg(),
                of_parts.lse.into_buffer_arg(),
                parts_rest.into_buffer_arg(),
            ),
            out.into_buffer_arg(),
            residual.map(TensorBinding::into_buffer_arg).into(),
            lse.into_buffer_arg(),
            lse_rest.map(TensorBinding::into_buffer_arg).into(),
            order,
            MergedSizesLaunch::new(parts, problem.q_heads, problem.q_len, rows, pairs),
            written,
            elem_type(problem.element),
        );
    }
}
