//! The kernel for products of a few rows.

use crate::product::few_rows::blueprint::Blueprint;
use crate::product::operands::Major;
use cubecl::prelude::*;

#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Extent {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Vectors of A from one row to the next.
    pub a_pitch: usize,
    /// Vectors of B from one row (or column) to the next.
    pub b_pitch: usize,
}

#[derive(CubeType, Clone, Copy)]
struct Place {
    /// The first row of the cube.
    row: usize,
    /// The first column of the unit; past the last there is none, and another unit's is read again.
    column: usize,
    /// The unit's share of the tiles of terms.
    slice: usize,
    /// The index of its sums in shared memory: lanes vary fastest.
    index: usize,
}

#[cube]
impl Place {
    fn this(#[comptime] bp: Blueprint) -> Place {
        let unit = UNIT_POS as usize;
        let (lanes, slices) = comptime!((bp.lanes, bp.slices()));
        // Neighbouring units read neighbouring vectors.
        let (mut lane, mut slice) = (unit % lanes, unit / lanes);
        if comptime!(bp.b == Major::Column) {
            lane = unit / slices;
            slice = unit % slices;
        }
        Place {
            row: CUBE_POS_Y as usize * comptime!(bp.rows),
            column: CUBE_POS_X as usize * comptime!(bp.columns())
                + lane * comptime!(bp.unit_columns()),
            slice,
            index: slice * lanes + lane,
        }
    }

    /// Adds `terms` products from `term` on to the sums `[rows, columns of the unit]`, one after the other.
    fn add_terms<E: Float, NA: Size, NB: Size>(
        &self,
        a: &[Vector<E, NA>],
        b: &[Vector<E, NB>],
        extent: &Extent,
        term: usize,
        sums: &mut Array<f32>,
        #[comptime] terms: usize,
        #[comptime] bp: Blueprint,
    ) {
        let (a_size, b_size) = (NA::value().comptime(), NB::value().comptime());
        let columns = comptime!(bp.unit_columns());
        let loads = comptime!(match bp.b {
            Major::Row => terms,
            Major::Column => columns,
        });
        // All loads before the first use.
        let mut loaded = Array::<Vector<E, NB>>::new(loads);
        #[unroll]
        for load in 0..loads {
            let at = if comptime!(bp.b == Major::Row) {
                (term + load) * extent.b_pitch + min(self.column, extent.n - b_size) / b_size
            } else {
                min(self.column + load, extent.n - 1) * extent.b_pitch + term / b_size
            };
            loaded[load] = b[at];
        }
        let mut factors = Array::<Vector<f32, NB>>::new(loads);
        #[unroll]
        for load in 0..loads {
            factors[load] = Vector::cast_from(loaded[load]);
        }
        #[unroll(bp.unroll())]
        for row in 0..comptime!(bp.rows) {
            let first = min(self.row + row, extent.m - 1) * extent.a_pitch + term / a_size;
            #[unroll]
            for piece in 0..comptime!(terms / a_size) {
                let part = Vector::<f32, NA>::cast_from(a[first + piece]);
                #[unroll]
                for e in 0..a_size {
                    #[unroll]
                    for column in 0..columns {
                        let (load, within) = comptime!(match bp.b {
                            Major::Row => (piece * a_size + e, column),
                            Major::Column => (column, piece * a_size + e),
                        });
                        let factor = factors[load].extract(within);
                        let to = row * columns + column;
                        sums[to] = fma(part.extract(e), factor, sums[to]);
                    }
                }
            }
        }
    }
}

/// `A B` of a few rows, with sums in f32.
///
/// | buffer | layout |
/// |---|---|
/// | `a` | `[m, k]`, contiguous rows |
/// | `b` | `[k, n]`, contiguous rows or columns as the blueprint says |
/// | `out` | `[m, n]`, contiguous, overwritten |
///
/// A cube owns `bp.columns()` columns of `bp.rows` rows: cube x is their column, y their row. Its units are in rows of
/// `bp.lanes`; each owns `bp.unit_columns()` of the columns and every `bp.slices()`th tile of the terms, which it
/// multiplies one after the other. The slices' sums are then added in an order that depends only on the blueprint's
/// units and lanes: a row has the same sums in any number of rows.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn product_few_rows_kernel<E: Float, O: Float, NA: Size, NB: Size>(
    a: &[Vector<E, NA>],
    b: &[Vector<E, NB>],
    out: &mut [O],
    extent: Extent,
    #[comptime] bp: Blueprint,
    #[define(E)] _element: ElemType,
    #[define(O)] _output: ElemType,
) {
    let place = Place::this(bp);
    let terms = comptime!(bp.terms());
    let mut sums = Array::<f32>::new(comptime!(bp.sums()));
    #[unroll(bp.unroll())]
    for i in 0..comptime!(bp.sums()) {
        sums[i] = 0.0f32;
    }
    let tiles = extent.k / terms;
    let mut tile = place.slice;
    while tile < tiles {
        place.add_terms::<E, NA, NB>(a, b, &extent, tile * terms, &mut sums, terms, bp);
        tile += comptime!(bp.slices());
    }
    if comptime!(bp.has_rest()) && place.slice == tiles % comptime!(bp.slices()) {
        for term in tiles * terms..extent.k {
            place.add_terms::<E, NA, NB>(a, b, &extent, term, &mut sums, 1usize, bp);
        }
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(bp.shared()));
    #[unroll(bp.unroll())]
    for round in 0..comptime!(bp.rows / bp.round) {
        // The sums of the previous round have been read.
        sync_cube();
        #[unroll(bp.unroll())]
        for i in 0..comptime!(bp.round_sums()) {
            shared[i * comptime!(bp.stride()) + place.index] =
                sums[round * comptime!(bp.round_sums()) + i];
        }
        sync_cube();
        add_slices(&mut shared, bp);
        sync_cube();
        let row = place.row + round * comptime!(bp.round);
        write_sums::<O>(&shared, out, &extent, row, bp);
    }
}

/// Adds up the slices' sums of each value, down to one per helper.
#[cube]
fn add_slices(shared: &mut Shared<[f32]>, #[comptime] bp: Blueprint) {
    let helpers = comptime!(bp.helpers());
    let mut value = UNIT_POS as usize / helpers;
    while value < comptime!(bp.round_sums()) {
        let at = value * comptime!(bp.stride()) + UNIT_POS as usize % helpers;
        let mut sum = shared[at];
        for other in 1..comptime!(bp.units / bp.helpers()) {
            sum += shared[at + other * helpers];
        }
        // No other unit reads it before the next barrier.
        shared[at] = sum;
        value += comptime!(bp.units / bp.helpers());
    }
}

/// Adds up the helpers' sums, and writes the rows of a round from `row` on.
#[cube]
fn write_sums<O: Float>(
    shared: &Shared<[f32]>,
    out: &mut [O],
    extent: &Extent,
    row: usize,
    #[comptime] bp: Blueprint,
) {
    let (columns, of_unit) = comptime!((bp.columns(), bp.unit_columns()));
    let first = CUBE_POS_X as usize * columns;
    let mut item = UNIT_POS as usize;
    while item < comptime!(bp.round * bp.columns()) {
        let (in_round, in_cube) = (item / columns, item % columns);
        let value = in_round * of_unit + in_cube % of_unit;
        let at = value * comptime!(bp.stride()) + in_cube / of_unit;
        let mut sum = shared[at];
        for other in 1..comptime!(bp.helpers() / bp.lanes) {
            sum += shared[at + other * comptime!(bp.lanes)];
        }
        if row + in_round < extent.m && first + in_cube < extent.n {
            out[(row + in_round) * extent.n + first + in_cube] = O::cast_from(sum);
        }
        item += comptime!(bp.units);
    }
}
