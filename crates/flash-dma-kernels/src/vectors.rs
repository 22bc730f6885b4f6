//! Vector types of several kernels.

use cubecl::prelude::*;

/// 16 bytes of a 16-bit type: the unit of a copy, and a row for `ldmatrix`.
pub(crate) type Segment<E> = Vector<E, Const<8>>;

/// Elements `2 quad` and `2 quad + 1` of a segment. A run-time index would move the segment to local memory.
#[cube]
pub(crate) fn pick<E: Float>(segment: Segment<E>, quad: usize) -> Vector<f32, Const<2>> {
    let all = Vector::<f32, Const<8>>::cast_from(segment);
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
