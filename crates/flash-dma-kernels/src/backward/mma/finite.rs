//! Rows with NaN or infinite elements, on tiles where some pairs are not selected.
//!
//! A product over a tile multiplies such a row by the zero weights of the pairs that are not selected,
//! too, and `0 * NaN` is NaN. Full tiles need none of this: there every pair is selected. A boundary
//! tile that holds such a row takes the slow ways of this module.

use crate::tile::is_finite;
use crate::tile::mma::{Accumulators, Chunk, set};
use cubecl::prelude::*;

/// Elements `2 quad` and `2 quad + 1` of a chunk. An index known only at run time would move the chunk
/// to local memory.
#[cube]
pub(in crate::backward) fn pick<E: Float>(chunk: Chunk<E>, quad: usize) -> Vector<f32, Const<2>> {
    let all = Vector::<f32, Const<8>>::cast_from(chunk);
    let mut pair = Vector::<f32, Const<2>>::new(0.0f32);
    #[unroll]
    for t in 0..4usize {
        #[unroll]
        for e in 0..2usize {
            if quad == t {
                pair.insert(e, all.extract(comptime!(t * 2 + e)));
            }
        }
    }
    pair
}

/// Zeroes the elements of a B fragment that are not finite.
#[cube]
pub(super) fn zero_not_finite<E: Float, NB: Size>(fragment: &mut Array<Vector<E, NB>>) {
    #[unroll]
    for register in 0..2usize {
        let mut values = fragment[register];
        #[unroll]
        for e in 0..2usize {
            if !is_finite(f32::cast_from(values.extract(e))) {
                values.insert(e, E::from_int(0));
            }
        }
        fragment[register] = values;
    }
}

/// Adds `weight * row` to one of the two rows that this lane holds of the accumulators
/// `first .. first + chunks`: rows `lane / 4` (`lower` false) or `lane / 4 + 8`.
#[cube]
pub(super) fn add_row<NC: Size>(
    out: &mut Accumulators<NC>,
    pair: Vector<f32, Const<2>>,
    weight: f32,
    #[comptime] at: usize,
    #[comptime] lower: usize,
) {
    let mut values = out[at][lower];
    #[unroll]
    for e in 0..2usize {
        values.insert(e, values.extract(e) + weight * pair.extract(e));
    }
    set(&mut out[at], lower, values);
}
