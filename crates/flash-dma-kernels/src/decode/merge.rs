//! Puts the outputs of the parts of the keys together.

use crate::scratch::cubes;
use crate::tile::{address_type, elem_type};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::DecodeProblem;

/// Units of a cube; a power of two.
const UNITS: usize = 128;

/// A cube owns a row of `out` and its `lse`:
///
/// `lse = log sum_p exp(lse_p)`, `out = sum_p exp(lse_p - lse) out_p`, the sums in an order that depends on nothing
/// but the number of parts. Unlike the forward pass there are few rows and maybe a thousand parts: units share
/// them.
///
/// | buffer | layout |
/// |---|---|
/// | `part_out` | contiguous `[parts, rows, 2 * pairs]`, each row of a part divided by that part's own sum |
/// | `part_lse` | contiguous `[parts, rows]`, -inf where a row attends to none of the part's keys |
/// | `out` | contiguous `[rows, 2 * pairs]`, overwritten |
/// | `lse` | contiguous `[rows]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
fn merge_parts_kernel<E: Float>(
    part_out: &[Vector<f32, Const<2>>],
    part_lse: &[f32],
    out: &mut [Vector<E, Const<2>>],
    lse: &mut [f32],
    parts: u32,
    rows: u32,
    #[comptime] pairs: usize,
    #[comptime] units: usize,
    #[define(E)] _element: ElemType,
) {
    let row = CUBE_POS;
    if row >= rows as usize {
        terminate!();
    }
    let (parts, rows) = (parts as usize, rows as usize);
    let unit = UNIT_POS as usize;
    let none = f32::new(f32::NEG_INFINITY);
    let mut shared = Shared::<[f32]>::new_slice(units);

    let mut greatest = none;
    let mut part = unit;
    while part < parts {
        greatest = max(greatest, part_lse[part * rows + row]);
        part += units;
    }
    shared[unit] = greatest;
    sync_cube();
    let mut half = usize::new(comptime!(units as i64 / 2));
    while half > 0 {
        if unit < half {
            shared[unit] = max(shared[unit], shared[unit + half]);
        }
        sync_cube();
        half /= 2;
    }
    greatest = shared[0];
    // Nothing but -inf, or NaN beside it: any finite reference serves.
    let reference = select(greatest == none, 0.0f32, greatest);

    // Groups of units take turns at the parts; a unit of a group owns a pair of columns, or several.
    let groups = comptime!((units / pairs).max(1));
    let mut sums = Shared::<[f32]>::new_slice(groups);
    let mut values = Shared::<[Vector<f32, Const<2>>]>::new_slice(comptime!(groups * pairs));
    let mut item = unit;
    while item < comptime!(groups * pairs) {
        let (group, column) = (item / pairs, item % pairs);
        let mut sum = 0.0f32;
        let mut value = Vector::<f32, Const<2>>::new(0.0f32);
        let mut part = group;
        while part < parts {
            let weight = (part_lse[part * rows + row] - reference).exp();
            sum += weight;
            value += Vector::new(weight) * part_out[(part * rows + row) * pairs + column];
            part += groups;
        }
        values[item] = value;
        if column == 0 {
            sums[group] = sum;
        }
        item += units;
    }
    sync_cube();
    let mut column = unit;
    while column < pairs {
        let mut sum = 0.0f32;
        let mut value = Vector::<f32, Const<2>>::new(0.0f32);
        for group in 0..groups {
            sum += sums[group];
            value += values[group * pairs + column];
        }
        // No key in any part: zeros and an LSE of -inf. NaN stays NaN.
        let empty = sum == 0.0f32;
        let mut result = Vector::<f32, Const<2>>::new(0.0f32);
        if !empty {
            result = value / Vector::new(sum);
        }
        out[row * pairs + column] = Vector::cast_from(result);
        if column == 0 {
            lse[row] = select(empty, none, reference + sum.ln());
        }
        column += units;
    }
}

/// Combines `parts` outputs of the queries of a step, f32 `[parts, batch, q_heads, tokens, head_dim]` and `[parts,
/// batch, q_heads, tokens]`, into `out` and `lse`; all contiguous.
pub(super) fn merge(
    client: &Client,
    problem: &DecodeProblem,
    parts: usize,
    [part_out, part_lse]: [TensorBinding; 2],
    out: TensorBinding,
    lse: TensorBinding,
) {
    let rows = problem.lse_shape().iter().product::<usize>();
    let cache = problem.append.cache;
    let hardware = &client.properties().hardware;
    let units = match hardware.plane_size_max {
        0 | 1 => 1,
        _ => UNITS.min(1 << (hardware.max_units_per_cube as usize).ilog2()),
    };
    let dim = CubeDim::new_1d(units as u32);
    // SAFETY: cubes past the rows return; the parts hold `parts` times the rows of the outputs.
    unsafe {
        merge_parts_kernel::launch_unchecked(
            client,
            cubes(client, rows, dim),
            dim,
            address_type(&[&out], cache.element.size())
                .max(address_type(&[&part_out, &part_lse], size_of::<f32>())),
            part_out.into_buffer_arg(),
            part_lse.into_buffer_arg(),
            out.into_buffer_arg(),
            lse.into_buffer_arg(),
            parts as u32,
            rows as u32,
            cache.head_dim / 2,
            units,
            elem_type(cache.element),
        );
    }
}
