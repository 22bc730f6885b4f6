//! The stages of keys and values in shared memory, the sources of their rows, and the segments that a unit copies.

use crate::dropout::{DropoutArg, column_word};
use crate::host::engine::Instruction;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::fragment::swizzle;
use crate::matrix::wgmma::panel::panel_place;
use crate::vectors::Segment;
use cubecl::prelude::*;

/// The stages of a cube in shared memory.
#[derive(CubeType)]
pub(crate) struct Stages<E: Float> {
    /// `[stages, key_tile, segments]`, segments placed by [`place_of`].
    pub k: Shared<[Segment<E>]>,
    /// `[stages, key_tile, segments]`, segments placed by [`place_of`].
    pub v: Shared<[Segment<E>]>,
    /// `[stages, key_tile]`; sparse and biased only.
    pub scores: Shared<[f32]>,
    /// `[stages, key_tile]`, first and end, if sparse; columns past the last key are empty intervals.
    /// `[stages, queries + 1]` if masked: the bits of each query, and the key block.
    pub intervals: Shared<[Vector<u32, Const<2>>]>,
    /// `[stages, key_tile]`: the words of the columns' keys, with dropout only.
    pub columns: ComptimeOption<Shared<[u32]>>,
    /// `[stages, key_tile]`: the columns' keys, with ALiBi only.
    pub keys: ComptimeOption<Shared<[f32]>>,
}

#[cube]
impl<E: Float> Stages<E> {
    pub(crate) fn new(#[comptime] bp: MmaBlueprint) -> Stages<E> {
        let columns = comptime!(bp.stages * bp.key_tile);
        let intervals = comptime!(bp.stages * bp.stage_intervals());
        let segments = comptime!(bp.stages * bp.key_tile * bp.segments());
        Stages::<E> {
            k: Shared::<[Segment<E>]>::new_aligned_slice(segments, comptime!(bp.alignment())),
            v: Shared::<[Segment<E>]>::new_aligned_slice(segments, comptime!(bp.alignment())),
            scores: Shared::<[f32]>::new_aligned_slice(columns, 128usize),
            intervals: Shared::<[Vector<u32, Const<2>>]>::new_aligned_slice(intervals, 128usize),
            columns: column_stages::<u32>(bp.dropout, bp),
            keys: column_stages::<f32>(bp.alibi, bp),
        }
    }

    /// Notes the key of column `place` of all stages, and its word.
    pub(crate) fn set_column(&mut self, place: usize, key: usize, dropout: &DropoutArg) {
        #[comptime]
        match &mut self.columns {
            ComptimeOption::Some(columns) => {
                columns[place] = column_word(key, dropout.as_ref().unwrap());
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match &mut self.keys {
            ComptimeOption::Some(keys) => keys[place] = f32::cast_from(key as u32),
            ComptimeOption::None => {}
        }
    }
}

/// Room for the notes on columns, if there are any.
#[cube]
fn column_stages<T: CubePrimitive>(
    #[comptime] noted: bool,
    #[comptime] bp: MmaBlueprint,
) -> ComptimeOption<Shared<[T]>> {
    if comptime!(noted) {
        ComptimeOption::new_Some(Shared::<[T]>::new_aligned_slice(
            comptime!(bp.stages * bp.key_tile),
            128usize,
        ))
    } else {
        ComptimeOption::new_None()
    }
}

#[cube]
pub(crate) fn place_of(row: usize, col: usize, #[comptime] bp: MmaBlueprint) -> usize {
    match comptime!(bp.instruction) {
        Instruction::Mma => swizzle(row, col, comptime!(bp.segments())),
        Instruction::Wgmma => {
            panel_place(row, col, comptime!(bp.key_tile), comptime!(bp.segments()))
        }
    }
}

/// The start of the rows of one kv head, in segments, and their stride.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowAddress {
    pub base: usize,
    pub stride: usize,
}

#[cube]
impl RowAddress {
    pub(crate) fn of<E: Float>(
        tensor: &Tensor<Segment<E>>,
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

#[derive(CubeType, Clone, Copy)]
pub(crate) struct TileSegment {
    pub row: usize,
    pub col: usize,
}

/// The `c`-th segment that this unit, of `units`, copies of every tile whose rows have `segments`; its row may lie
/// past the tile's last.
#[cube]
pub(crate) fn copied_segment(
    #[comptime] c: usize,
    #[comptime] units: usize,
    #[comptime] segments: usize,
) -> TileSegment {
    let unit = UNIT_POS as usize;
    if comptime!(units.is_multiple_of(segments)) {
        // The same column each time, which saves most of the address arithmetic.
        TileSegment {
            row: unit / segments + comptime!(c * units / segments),
            col: unit % segments,
        }
    } else {
        let at = unit + comptime!(c * units);
        TileSegment {
            row: at / segments,
            col: at % segments,
        }
    }
}
