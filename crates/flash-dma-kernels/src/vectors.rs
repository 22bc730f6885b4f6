//! Vector types of several kernels.

use cubecl::prelude::*;

/// 16 bytes of a 16-bit type: what a copy moves and `ldmatrix` reads a row of.
pub(crate) type Chunk<E> = Vector<E, Const<8>>;

/// Elements `2 quad` and `2 quad + 1` of a chunk. An index known only at run time would move the chunk
/// to local memory.
#[cube]
pub(crate) fn pick<E: Float>(chunk: Chunk<E>, quad: usize) -> Vector<f32, Const<2>> {
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
