//! The key tile and the chunk of queries that a cube owns.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::{BackwardInputs, KeyGrid, KeyTileSource};
use crate::pattern::intervals::classes::QueryChunks;
use cubecl::prelude::*;

#[derive(CubeType, Clone, Copy)]
pub(crate) struct HeadSizes {
    pub q_heads: usize,
    pub q_len: usize,
    pub kv_heads: usize,
    pub k_len: usize,
    pub group: usize,
}

#[cube]
impl HeadSizes {
    fn of<E: Float>(inputs: &BackwardInputs<E>) -> HeadSizes {
        let (q_heads, q_len) = (inputs.q.shape(1), inputs.q.shape(2));
        let (kv_heads, k_len) = (inputs.k.shape(1), inputs.k.shape(2));
        HeadSizes {
            q_heads,
            q_len,
            kv_heads,
            k_len,
            group: q_heads / kv_heads,
        }
    }
}

/// A cube's key tile, and its chunk of queries.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ChunkTile {
    /// The index of the tile's first key among those of the chunk, and how many keys the chunk has.
    pub start: usize,
    pub count: usize,
    /// The tile's first entry in the list.
    pub list_row: usize,
    /// The sequence, its kv head, and that head counted over all sequences.
    pub batch: usize,
    pub kv_head: usize,
    pub kv_row: usize,
    pub sizes: HeadSizes,
    /// The chunk's queries.
    pub chunk_first: i32,
    pub chunk_end: i32,
}

#[cube]
impl ChunkTile {
    /// The key tile of this cube; ends the cube where the chunk has fewer tiles than others.
    pub(crate) fn of_cube<E: Float>(
        inputs: &BackwardInputs<E>,
        source: &KeyTileSource,
        grid: &KeyGrid,
        #[comptime] bp: DkdvBlueprint,
    ) -> ChunkTile {
        let sizes = HeadSizes::of::<E>(inputs);
        let item = CUBE_POS_X as usize / grid.tiles as usize;
        let tile = CUBE_POS_X as usize % grid.tiles as usize;
        ChunkTile::new(source, grid, item, tile, sizes, bp)
    }

    /// [`of_cube`](Self::of_cube) for tiles of keys whose ranks learn, in the order that suits the rank kernel.
    pub(crate) fn of_ranked<E: Float>(
        inputs: &BackwardInputs<E>,
        source: &KeyTileSource,
        grid: &KeyGrid,
        #[comptime] bp: DkdvBlueprint,
    ) -> ChunkTile {
        let sizes = HeadSizes::of::<E>(inputs);
        let items = CUBE_COUNT_X as usize / grid.tiles as usize;
        if comptime!(bp.shared_keys) {
            // All tiles of a chunk, of every kv head, come before those of the next chunk.
            let chunks = grid.chunks as usize;
            let rows = items / chunks;
            let chunk = CUBE_POS_X as usize / (rows * grid.tiles as usize);
            let tile = CUBE_POS_X as usize / rows % grid.tiles as usize;
            let item = CUBE_POS_X as usize % rows * chunks + chunk;
            ChunkTile::new(source, grid, item, tile, sizes, bp)
        } else {
            ChunkTile::last_first(source, grid, items, sizes, bp)
        }
    }

    /// The last keys of a list over all queries have the most queries: the last tiles of all kv heads come first, so
    /// that short ones fill the end of the launch.
    fn last_first(
        source: &KeyTileSource,
        grid: &KeyGrid,
        items: usize,
        sizes: HeadSizes,
        #[comptime] bp: DkdvBlueprint,
    ) -> ChunkTile {
        let item = CUBE_POS_X as usize % items;
        let count = source.intervals.as_ref().unwrap().counts[item] as usize;
        let tiles = count.div_ceil(comptime!(bp.keys()));
        let before = CUBE_POS_X as usize / items;
        if before >= tiles {
            terminate!();
        }
        ChunkTile::new(source, grid, item, tiles - 1 - before, sizes, bp)
    }

    /// Tile `tile` of chunk `item`, counted over all kv heads.
    fn new(
        source: &KeyTileSource,
        grid: &KeyGrid,
        item: usize,
        tile: usize,
        sizes: HeadSizes,
        #[comptime] bp: DkdvBlueprint,
    ) -> ChunkTile {
        let kv_row = item / grid.chunks as usize;
        let (batch, kv_head) = (kv_row / sizes.kv_heads, kv_row % sizes.kv_heads);
        let start = tile * comptime!(bp.keys());
        let chunk_first = (item % grid.chunks as usize * grid.chunk as usize) as i32;
        let chunk_end = min(chunk_first + grid.chunk as i32, sizes.q_len as i32);
        let mut count = sizes.k_len;
        if comptime!(bp.pattern.has_intervals()) {
            count = source.intervals.as_ref().unwrap().counts[item] as usize;
        }
        if start >= count {
            terminate!();
        }
        ChunkTile {
            start,
            count,
            list_row: item * grid.capacity as usize + start,
            batch,
            kv_head,
            kv_row,
            sizes,
            chunk_first,
            chunk_end,
        }
    }

    /// The cut of all queries into chunks.
    pub(crate) fn chunks(&self, grid: &KeyGrid) -> QueryChunks {
        QueryChunks {
            q_len: self.sizes.q_len as u32,
            k_len: self.sizes.k_len as u32,
            chunk: grid.chunk,
        }
    }

    /// The key at index `local` of the tile.
    pub(crate) fn key_of(
        &self,
        source: &KeyTileSource,
        local: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> usize {
        let mut key = self.start + local;
        if comptime!(bp.pattern.has_intervals()) {
            key = source.intervals.as_ref().unwrap().list[self.list_row + local] as usize;
        }
        key
    }

    /// The row of the gradients of the key at index `local`.
    pub(crate) fn row_of(
        &self,
        source: &KeyTileSource,
        local: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> usize {
        let mut row = self.list_row + local;
        if comptime!(!bp.parts) {
            row = self.kv_row * self.sizes.k_len + self.key_of(source, local, bp);
        }
        row
    }
}
