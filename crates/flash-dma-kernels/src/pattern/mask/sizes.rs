//! The lists of a mask's query tiles and their sizes.

use crate::pattern::layout::{KEY_BLOCK, TILE_LIST_HEADER, TILE_LIST_WORDS};
use cubecl::prelude::*;
use flash_dma_problem::PlanGeometry;

/// Planes that list a tile together, one range of blocks each.
pub(crate) const PLANES: usize = 8;

/// The keys that each query tile sees, for every row of the mask, as described in [`mask`](crate::matrix::mask).
#[derive(Clone, Debug)]
pub(crate) struct TileLists {
    /// `[batch, heads, tiles, capacity]` of the mask, u32; past a list's end undefined.
    pub list: TensorBinding,
    /// [`TILE_LIST_HEADER`] words, then `[batch, heads, tiles, TILE_LIST_WORDS]`, u32.
    pub counts: TensorBinding,
}

#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// Tiles of a row of the mask, and of all rows.
    pub tiles: usize,
    pub items: usize,
    pub queries: usize,
    pub blocks: usize,
    /// Capacity of a gathered list in keys, in whole steps; its bits begin after them.
    pub room: usize,
}

/// The sizes of the lists of one call as kernel arguments.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct ListSizes {
    pub tiles: usize,
    pub queries: usize,
    pub capacity: usize,
    pub room: usize,
    pub q_len: usize,
    pub k_len: usize,
    /// Key blocks and queries of the bits of the plan.
    pub bit_blocks: usize,
    pub bit_queries: usize,
}

impl Sizes {
    pub(crate) fn new(geometry: &PlanGeometry, queries: usize, gather: bool) -> Self {
        let [batch, heads, _, blocks] = geometry.counts_shape();
        let tiles = geometry.q_len.div_ceil(queries);
        Self {
            tiles,
            items: batch * heads * tiles,
            queries,
            blocks,
            room: if gather {
                (geometry.k_len / GATHERED_PART).next_multiple_of(KEY_BLOCK)
            } else {
                0
            },
        }
    }

    pub(crate) fn of_kernels(&self, geometry: &PlanGeometry) -> ListSizesLaunch {
        let [_, _, bit_blocks, bit_queries, _] = geometry.bits_shape();
        ListSizesLaunch::new(
            self.tiles,
            self.queries,
            self.capacity(),
            self.room,
            geometry.q_len,
            geometry.k_len,
            bit_blocks,
            bit_queries,
        )
    }

    pub(crate) fn list(&self, geometry: &PlanGeometry) -> [usize; 4] {
        let [batch, heads, ..] = geometry.counts_shape();
        [batch, heads, self.tiles, self.capacity()]
    }

    pub(crate) fn counts(&self) -> [usize; 1] {
        [TILE_LIST_HEADER + self.items * TILE_LIST_WORDS]
    }

    /// The shape of the keys of each block that some, and that all, queries of a tile see: two words each.
    pub(crate) fn spans(&self) -> [usize; 2] {
        [self.items * self.blocks, 4]
    }

    /// Words per list: blocks, or keys and their bits, which are read in pairs.
    pub(crate) fn capacity(&self) -> usize {
        let gathered = self.room + self.room / 32 * self.queries;
        self.blocks.max(gathered).next_multiple_of(2)
    }
}

/// A gathered list has room for one in this many of all keys.
pub(crate) const GATHERED_PART: usize = 2;
