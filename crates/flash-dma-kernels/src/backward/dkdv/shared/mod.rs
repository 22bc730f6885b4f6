//! Code that both engines share: a key tile's keys and mask, its query stream, and the sums over chunks of queries.

pub(crate) mod alibi;
pub(crate) mod args;
pub(crate) mod chunk_tile;
pub(crate) mod dropout;
pub(crate) mod gather;
pub(crate) mod key_sums;
pub(crate) mod keys;
pub(crate) mod mask;
pub(crate) mod queries;
pub(crate) mod steps;
pub(crate) mod sums;

use cubecl::prelude::*;

/// Room for `count` words or numbers in shared memory, if they `exist`.
#[cube]
pub(crate) fn room_if<T: CubePrimitive>(
    #[comptime] exist: bool,
    #[comptime] count: usize,
) -> ComptimeOption<Shared<[T]>> {
    if comptime!(exist) {
        ComptimeOption::new_Some(Shared::<[T]>::new_aligned_slice(count, 128usize))
    } else {
        ComptimeOption::new_None()
    }
}
