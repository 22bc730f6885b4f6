//! The stages of keys and values in shared memory, and the sources of their rows.

use crate::host::engine::Instruction;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::fragment::swizzle;
use crate::matrix::wgmma::panel::panel_place;
use crate::vectors::Chunk;
use cubecl::prelude::*;

/// The stages of a cube in shared memory.
#[derive(CubeType)]
pub(crate) struct Stages<E: Float> {
    /// `[stages, key_tile, chunks]`, chunks placed by [`place_of`].
    pub k: Shared<[Chunk<E>]>,
    /// `[stages, key_tile, chunks]`, chunks placed by [`place_of`].
    pub v: Shared<[Chunk<E>]>,
    /// `[stages, key_tile]`; sparse and biased only.
    pub scores: Shared<[f32]>,
    /// `[stages, key_tile]`, first and end, if sparse; slots past the last key are empty intervals.
    /// `[stages, queries + 1]` if masked: the bits of each query, and the key block.
    pub intervals: Shared<[Vector<u32, Const<2>>]>,
}

#[cube]
impl<E: Float> Stages<E> {
    pub(crate) fn new(#[comptime] bp: MmaBlueprint) -> Stages<E> {
        let slots = comptime!(bp.stages * bp.key_tile);
        let intervals = comptime!(bp.stages * bp.interval_slots());
        let chunks = comptime!(bp.stages * bp.key_tile * bp.chunks());
        Stages::<E> {
            k: Shared::<[Chunk<E>]>::new_aligned_slice(chunks, comptime!(bp.alignment())),
            v: Shared::<[Chunk<E>]>::new_aligned_slice(chunks, comptime!(bp.alignment())),
            scores: Shared::<[f32]>::new_aligned_slice(slots, 128usize),
            intervals: Shared::<[Vector<u32, Const<2>>]>::new_aligned_slice(intervals, 128usize),
        }
    }
}

/// Offset of chunk `col` of row `row` in a stage.
#[cube]
pub(crate) fn place_of(row: usize, col: usize, #[comptime] bp: MmaBlueprint) -> usize {
    match comptime!(bp.instruction) {
        Instruction::Mma => swizzle(row, col, comptime!(bp.chunks())),
        Instruction::Wgmma => panel_place(row, col, comptime!(bp.key_tile), comptime!(bp.chunks())),
    }
}

/// The start of the rows of one kv head, in chunks, and their stride.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowAddress {
    pub base: usize,
    pub stride: usize,
}

#[cube]
impl RowAddress {
    pub(crate) fn of<E: Float>(
        tensor: &Tensor<Chunk<E>>,
        batch: usize,
        kv_head: usize,
    ) -> RowAddress {
        RowAddress {
            base: (batch * tensor.stride(0) + kv_head * tensor.stride(1)) / 8,
            stride: tensor.stride(2) / 8,
        }
    }

    /// The rows from key `begin` on.
    pub(crate) fn starting_at(&self, begin: usize) -> RowAddress {
        RowAddress {
            base: self.base + begin * self.stride,
            stride: self.stride,
        }
    }
}
