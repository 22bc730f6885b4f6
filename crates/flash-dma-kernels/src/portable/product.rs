//! The two matrix products of a tile, on the register tile of each unit.

use crate::portable::blueprint::{Blueprint, LANES};
use crate::portable::memory::Row4;
use crate::portable::visibility::{Visibility, VisibilityExpand};
use cubecl::prelude::*;

/// `out[o, i] = outer row y + o * units_y . inner row x + i * units_x`.
#[cube]
pub fn products(
    outer: &Shared<[Row4]>,
    inner: &Shared<[Row4]>,
    out: &mut Array<f32>,
    #[comptime] bp: Blueprint,
) {
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let stride = comptime!(bp.row_stride());
    #[unroll(bp.unroll())]
    for n in 0..comptime!(bp.micro.outer * bp.micro.inner) {
        out[n] = 0.0f32;
    }
    let mut rows = Array::<Row4>::new(comptime!(bp.micro.outer));
    for vector in 0..comptime!(bp.vectors()) {
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            rows[o] = outer[(y + o * comptime!(bp.micro.units_y)) * stride + vector];
        }
        #[unroll(bp.unroll())]
        for i in 0..comptime!(bp.micro.inner) {
            let row = inner[(x + i * comptime!(bp.micro.units_x)) * stride + vector];
            #[unroll(bp.unroll())]
            for o in 0..comptime!(bp.micro.outer) {
                let n = o * comptime!(bp.micro.inner) + i;
                let mut sum = out[n];
                #[unroll]
                for e in 0..LANES {
                    sum += rows[o].extract(e) * row.extract(e);
                }
                out[n] = sum;
            }
        }
    }
}

/// `acc[o, c] += sum over the inner rows i of weight[y + o * units_y, i] * inner[i, x + c * units_x]`, where `acc` has
/// `unit_vectors` vectors per outer row.
///
/// The weights of a row are in the layout in which their unit wrote them: vector `x * weight_vectors + k` holds the
/// inner rows `x + (4 k + e) * units_x`. They are zero for the pairs that are not selected, which is enough while the
/// inner rows are finite; otherwise use [`accumulate_selected`].
#[cube]
pub(crate) fn accumulate(
    acc: &mut Array<Row4>,
    weights: &Shared<[Row4]>,
    inner: &Shared<[Row4]>,
    #[comptime] bp: Blueprint,
) {
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let units_x = comptime!(bp.micro.units_x);
    let parts = comptime!(bp.weight_vectors());
    let mut weight = Array::<Row4>::new(comptime!(bp.micro.outer));
    for column in 0..comptime!(units_x * parts) {
        #[unroll(bp.unroll())]
        for o in 0..comptime!(bp.micro.outer) {
            let row = y + o * comptime!(bp.micro.units_y);
            weight[o] = weights[row * comptime!(bp.weight_stride()) + column];
        }
        let first = column / parts + column % parts * comptime!(LANES * units_x);
        #[unroll]
        for e in 0..LANES {
            let row = first + comptime!(e * units_x);
            #[unroll(bp.unroll())]
            for c in 0..comptime!(bp.unit_vectors()) {
                let value = inner[row * comptime!(bp.row_stride()) + x + c * units_x];
                #[unroll(bp.unroll())]
                for o in 0..comptime!(bp.micro.outer) {
                    let n = o * comptime!(bp.unit_vectors()) + c;
                    acc[n] += value * Row4::new(weight[o].extract(e));
                }
            }
        }
    }
}

/// [`accumulate`] over the selected pairs alone, in the same order and thus with the same rounding:
/// the slow form for inner rows with NaN or infinities, which must not reach an outer row that does
/// not select them.
#[cube]
pub(crate) fn accumulate_selected<V: Visibility>(
    acc: &mut Array<Row4>,
    weights: &Shared<[Row4]>,
    inner: &Shared<[Row4]>,
    visibility: &V,
    #[comptime] bp: Blueprint,
) {
    let (x, y) = (UNIT_POS_X as usize, UNIT_POS_Y as usize);
    let units_x = comptime!(bp.micro.units_x);
    let parts = comptime!(bp.weight_vectors());
    for column in 0..comptime!(units_x * parts) {
        let first = column / parts + column % parts * comptime!(LANES * units_x);
        #[unroll]
        for e in 0..LANES {
            let row = first + comptime!(e * units_x);
            #[unroll(bp.unroll())]
            for o in 0..comptime!(bp.micro.outer) {
                let outer = y + o * comptime!(bp.micro.units_y);
                if visibility.selected(outer, row) {
                    let at = outer * comptime!(bp.weight_stride()) + column;
                    let weight = Row4::new(weights[at].extract(e));
                    #[unroll(bp.unroll())]
                    for c in 0..comptime!(bp.unit_vectors()) {
                        let n = o * comptime!(bp.unit_vectors()) + c;
                        acc[n] +=
                            inner[row * comptime!(bp.row_stride()) + x + c * units_x] * weight;
                    }
                }
            }
        }
    }
}
