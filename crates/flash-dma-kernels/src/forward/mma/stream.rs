//! The keys of a query tile, copied into shared memory ahead of their use.

use super::blueprint::{Instruction, MmaBlueprint};
use super::rows::TileKeys;
use crate::tile::is_finite;
use crate::tile::mma::{Chunk, copied_chunk, copy_or_zero, swizzle};
use crate::tile::wgmma::panel_place;
use cubecl::prelude::*;

/// The stages of a cube in shared memory.
#[derive(CubeType)]
pub(crate) struct Stages<E: Float> {
    /// `[stages, key_tile, chunks]`, chunks placed by [`place_of`].
    pub k: Shared<[Chunk<E>]>,
    /// `[stages, key_tile, chunks]`, chunks placed by [`place_of`].
    pub v: Shared<[Chunk<E>]>,
    /// `[stages, key_tile]`; sparse only.
    pub scores: Shared<[f32]>,
    /// `[stages, key_tile]`, first and end; sparse only. Slots past the last key are empty intervals.
    pub intervals: Shared<[Vector<u32, Const<2>>]>,
}

#[cube]
impl<E: Float> Stages<E> {
    pub(crate) fn new(#[comptime] bp: MmaBlueprint) -> Stages<E> {
        let slots = comptime!(bp.stages * bp.key_tile);
        let chunks = comptime!(bp.stages * bp.key_tile * bp.chunks());
        Stages::<E> {
            k: Shared::<[Chunk<E>]>::new_aligned_slice(chunks, comptime!(bp.alignment())),
            v: Shared::<[Chunk<E>]>::new_aligned_slice(chunks, comptime!(bp.alignment())),
            scores: Shared::<[f32]>::new_aligned_slice(slots, 128usize),
            intervals: Shared::<[Vector<u32, Const<2>>]>::new_aligned_slice(slots, 128usize),
        }
    }
}

/// Where chunk `col` of row `row` lies in a stage.
#[cube]
pub(super) fn place_of(row: usize, col: usize, #[comptime] bp: MmaBlueprint) -> usize {
    match comptime!(bp.instruction) {
        Instruction::Mma => swizzle(row, col, comptime!(bp.chunks())),
        Instruction::Wgmma => panel_place(row, col, comptime!(bp.key_tile)),
    }
}

/// Where the rows of one kv head begin, in chunks, and how far apart they are.
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

/// Reads the keys that this unit copies of tile `tile` from the list: `bp.copies()` of them, and one
/// whose score and interval it copies. A tile ahead of their use, so that the copies do not wait.
#[cube]
fn read_keys(
    list: &Tensor<u32>,
    keys: &TileKeys,
    tile: usize,
    next: &mut Array<u32>,
    #[comptime] bp: MmaBlueprint,
) {
    let copies = comptime!(bp.copies());
    let unit = UNIT_POS as usize;
    #[unroll]
    for c in 0..copies {
        let own = copied_chunk(c, comptime!(bp.units()), comptime!(bp.chunks()));
        let slot = tile * comptime!(bp.key_tile) + own.row;
        if slot < keys.total {
            next[c] = list[keys.list + slot];
        }
    }
    let slot = tile * comptime!(bp.key_tile) + unit;
    if unit < comptime!(bp.key_tile) && slot < keys.total {
        next[copies] = list[keys.list + slot];
    }
}

/// What [`start_copies`] wants of the first tile.
#[cube]
pub(crate) fn first_keys(
    list: &Tensor<u32>,
    keys: &TileKeys,
    #[comptime] bp: MmaBlueprint,
) -> Array<u32> {
    let mut next = Array::<u32>::new(comptime!(bp.copies() + 1));
    #[unroll]
    for c in 0..comptime!(bp.copies() + 1) {
        next[c] = 0u32;
    }
    if comptime!(bp.sparse) {
        read_keys(list, keys, 0usize, &mut next, bp);
    }
    next
}

/// Starts the copies of tile `tile` into its stage. `next` holds what [`read_keys`] read of it, and then of
/// the tile behind it. Slots past the last key become zeros, which no query is let see.
#[cube]
pub(crate) fn start_copies<E: Float>(
    k: &Tensor<Chunk<E>>,
    v: &Tensor<Chunk<E>>,
    scores: &Tensor<f32>,
    intervals: &[Vector<u32, Const<2>>],
    list: &Tensor<u32>,
    k_rows: &RowAddress,
    v_rows: &RowAddress,
    score_row: usize,
    interval_row: usize,
    keys: &TileKeys,
    tile: usize,
    next: &mut Array<u32>,
    stages: &mut Stages<E>,
    #[comptime] bp: MmaBlueprint,
) {
    let key_tile = comptime!(bp.key_tile);
    let stage = tile % comptime!(bp.stages);
    #[unroll]
    for c in 0..comptime!(bp.copies()) {
        let own = copied_chunk(c, comptime!(bp.units()), comptime!(bp.chunks()));
        let slot = tile * key_tile + own.row;
        // A copy of no byte fills its place with zeros, and reads nothing.
        let there = slot < keys.total;
        let mut key = slot;
        if comptime!(bp.sparse) {
            key = next[c] as usize;
        }
        let place = stage * comptime!(bp.key_tile * bp.chunks()) + place_of(own.row, own.col, bp);
        if comptime!(bp.whole_copies()) || own.row < key_tile {
            let from = k_rows.base + key * k_rows.stride + own.col;
            copy_or_zero(
                &k[from..from + 1],
                &mut stages.k[place..place + 1],
                there,
                16u32,
            );
            let from = v_rows.base + key * v_rows.stride + own.col;
            copy_or_zero(
                &v[from..from + 1],
                &mut stages.v[place..place + 1],
                there,
                16u32,
            );
        }
    }
    if comptime!(bp.sparse) {
        let unit = UNIT_POS as usize;
        if unit < key_tile {
            let place = stage * key_tile + unit;
            let there = tile * key_tile + unit < keys.total;
            let key = next[comptime!(bp.copies())] as usize;
            let from = score_row + key;
            copy_or_zero(
                &scores[from..from + 1],
                &mut stages.scores[place..place + 1],
                there,
                4u32,
            );
            let from = interval_row + key;
            copy_or_zero(
                &intervals[from..from + 1],
                &mut stages.intervals[place..place + 1],
                there,
                8u32,
            );
        }
        read_keys(list, keys, tile + 1, next, bp);
    }
}

/// Zeroes the elements of tile `tile` in `rows`, one of the buffers of [`Stages`], that are not finite,
/// and says whether there are some: on a tile that some row does not see whole, `0 * NaN` would leak them
/// into that row. This unit looks at what it copied itself, which must have landed; without `zero` it
/// only looks.
#[cube]
pub(crate) fn zero_not_finite<E: Float>(
    rows: &mut Shared<[Chunk<E>]>,
    tile: usize,
    #[comptime] zero: bool,
    #[comptime] bp: MmaBlueprint,
) -> bool {
    let base = tile % comptime!(bp.stages) * comptime!(bp.key_tile * bp.chunks());
    let mut any = false;
    #[unroll]
    for c in 0..comptime!(bp.copies()) {
        let own = copied_chunk(c, comptime!(bp.units()), comptime!(bp.chunks()));
        if own.row < comptime!(bp.key_tile) {
            let place = base + place_of(own.row, own.col, bp);
            let mut values = rows[place];
            let mut finite = true;
            #[unroll]
            for e in 0..8usize {
                if !is_finite(f32::cast_from(values.extract(e))) {
                    finite = false;
                    values.insert(e, E::from_int(0));
                }
            }
            if !finite {
                any = true;
                if comptime!(zero) {
                    rows[place] = values;
                }
            }
        }
    }
    any
}
