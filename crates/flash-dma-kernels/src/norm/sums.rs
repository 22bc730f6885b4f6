//! The second stage of the gradient of gamma.

use crate::norm::blueprint::SumsBlueprint;
use cubecl::prelude::*;

/// `gradient[j]` = the sum of column `j` of `parts`: a cube owns neighbouring columns, unit `(x, y)` adds up the rows
/// `y`, `y + slices` and so on of column `x`, and the first of a column's units the slices, in order.
///
/// | buffer | layout |
/// |---|---|
/// | `parts` | contiguous `[rows, width]`, f32 |
/// | `gradient` | `[width]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn gamma_gradient_kernel<E: Float>(
    parts: &[f32],
    gradient: &mut [E],
    rows: usize,
    width: usize,
    #[comptime] bp: SumsBlueprint,
    #[define(E)] _element: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(bp.columns * bp.slices));
    let (x, slice) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let column = CUBE_POS_X as usize * comptime!(bp.columns) + x;
    let mut sum = 0.0f32;
    if column < width {
        let mut row = slice;
        while row < rows {
            sum += parts[row * width + column];
            row += comptime!(bp.slices);
        }
    }
    if comptime!(bp.slices > 1) {
        shared[slice * comptime!(bp.columns) + x] = sum;
        sync_cube();
        if slice == 0 {
            for other in 1..comptime!(bp.slices) {
                sum += shared[other * comptime!(bp.columns) + x];
            }
        }
    }
    if slice == 0 && column < width {
        gradient[column] = E::cast_from(sum);
    }
}
