//! The keys of a query tile: the offset of its list and its number of keys.

use crate::matrix::args::KeySource;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::query_tile::{broadcast_row, tile_counts};
use crate::matrix::rows::CubeTile;
use crate::pattern::layout::KEY_BLOCK;
use crate::pattern::position::end_key;
use cubecl::prelude::*;

/// The keys of one query tile: its list if `bp.pattern.has_intervals()`, the listed blocks if
/// `bp.pattern.is_planned()`, otherwise the keys `begin..begin + total`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TileKeys {
    /// Offset of the list.
    pub list: usize,
    /// The key of column 0; 0 if the keys are listed.
    pub begin: usize,
    /// Keys that every query of the tile attends to; they come first.
    pub full: usize,
    pub total: usize,
    /// True if a tile plan's list has single keys, not blocks of them.
    pub gathered: bool,
}

#[cube]
impl TileKeys {
    pub(crate) fn new(source: &KeySource, own: &CubeTile) -> TileKeys {
        let bp = comptime!(own.bp);
        // Without causal masking all tiles share one list.
        let mut place = 0usize;
        if comptime!(bp.causal) {
            place = own.local;
        }
        let mut base = 0usize;
        let mut full = own.k_len;
        let mut total = own.k_len;
        let mut gathered = false;
        if comptime!(bp.pattern.has_intervals()) {
            let lists = source.intervals.as_ref().unwrap();
            base = own.kv_row * lists.list.stride(0) + place * lists.list.stride(1);
            let at = own.kv_row * lists.counts.stride(0) + place * lists.counts.stride(1);
            full = lists.counts[at] as usize;
            total = lists.counts[at + 1] as usize;
        } else if comptime!(bp.pattern.is_planned()) {
            let plan = source.plan.as_ref().unwrap();
            let list = &plan.list;
            let (batch, head) = broadcast_row(list, own);
            base = batch * list.stride(0) + head * list.stride(1) + own.tile * list.stride(2);
            let at = tile_counts(list, own, own.tile);
            full = plan.counts[at] as usize;
            total = plan.counts[at + 1] as usize;
            gathered = plan.counts[at + 2] == 1u32;
        } else if comptime!(bp.causal) {
            let first = own.tile * comptime!(bp.queries());
            let last = min(first + comptime!(bp.queries()), own.q_len);
            full = max(end_key(first, own.q_len, own.k_len, bp.causal), 0i32) as usize;
            total = max(end_key(last - 1, own.q_len, own.k_len, bp.causal), 0i32) as usize;
        }
        TileKeys {
            list: base,
            begin: 0usize,
            full,
            total,
            gathered,
        }
    }

    /// The part of these keys that the cube owns: all of them or, if `bp.split`, part `CUBE_POS_Z` of `CUBE_COUNT_Z`,
    /// in whole key tiles that are divided as evenly as possible. Their columns count from 0.
    pub(crate) fn part(&self, #[comptime] bp: MmaBlueprint) -> TileKeys {
        let mut part = TileKeys {
            list: self.list,
            begin: self.begin,
            full: self.full,
            total: self.total,
            gathered: self.gathered,
        };
        if comptime!(bp.split) {
            let key_tile = comptime!(bp.key_tile);
            let (index, count) = (CUBE_POS_Z as usize, CUBE_COUNT_Z as usize);
            let tiles = self.tiles(bp);
            let from = tiles * index / count * key_tile;
            let to = min(tiles * (index + 1) / count * key_tile, self.total);
            if comptime!(bp.pattern.has_intervals()) {
                part.list += from;
            } else {
                part.begin = from;
            }
            part.full = max(min(self.full, to), from) - from;
            part.total = to - from;
        }
        part
    }

    /// The number of key tiles; full ones come first.
    pub(crate) fn tiles(&self, #[comptime] bp: MmaBlueprint) -> usize {
        self.total.div_ceil(comptime!(bp.key_tile))
    }

    /// The number of full tiles, whose keys every query sees. The others are boundary tiles.
    pub(crate) fn full_tiles(&self, #[comptime] bp: MmaBlueprint) -> usize {
        self.full / comptime!(bp.key_tile)
    }
}

/// The key of column `column` of a listed tile; may be past the last key in a last block.
#[cube]
pub(crate) fn listed_key(list: &Tensor<u32>, keys: &TileKeys, column: usize) -> usize {
    let mut place = keys.list + column / KEY_BLOCK;
    if keys.gathered {
        place = keys.list + column;
    }
    let entry = list[place] as usize;
    select(keys.gathered, entry, entry * KEY_BLOCK + column % KEY_BLOCK)
}
