//! The key tile and the chunk of queries that a cube owns.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::{KeyGrid, KeyTileSource};
use crate::pattern::intervals::chunks::QueryChunks;
use cubecl::prelude::*;

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
    pub q_len: usize,
    pub k_len: usize,
    /// The chunk's queries.
    pub chunk_first: i32,
    pub chunk_end: i32,
}

#[cube]
impl ChunkTile {
    /// The key tile of this cube; ends the cube where the chunk has fewer tiles than others.
    pub(crate) fn of_cube(
        source: &KeyTileSource,
        grid: &KeyGrid,
        kv_heads: usize,
        q_len: usize,
        k_len: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> ChunkTile {
        let item = CUBE_POS_X as usize / grid.tiles as usize;
        let tile = CUBE_POS_X as usize % grid.tiles as usize;
        ChunkTile::new(source, grid, item, tile, kv_heads, q_len, k_len, bp)
    }

    /// As [`of_cube`](Self::of_cube) for tiles of keys whose ranks learn, in the order that suits the rank kernel.
    pub(crate) fn of_ranked(
        source: &KeyTileSource,
        grid: &KeyGrid,
        kv_heads: usize,
        q_len: usize,
        k_len: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> ChunkTile {
        let items = CUBE_COUNT_X as usize / grid.tiles as usize;
        if comptime!(bp.shared_keys) {
            // All tiles of a chunk, of every kv head, before those of the next.
            let chunks = grid.chunks as usize;
            let rows = items / chunks;
            let chunk = CUBE_POS_X as usize / (rows * grid.tiles as usize);
            let tile = CUBE_POS_X as usize / rows % grid.tiles as usize;
            let item = CUBE_POS_X as usize % rows * chunks + chunk;
            ChunkTile::new(source, grid, item, tile, kv_heads, q_len, k_len, bp)
        } else {
            ChunkTile::last_first(source, grid, items, kv_heads, q_len, k_len, bp)
        }
    }

    /// The last keys of a list over all queries have the most queries: the last tiles of all kv heads come first, so
    /// that short ones fill the end of the launch.
    fn last_first(
        source: &KeyTileSource,
        grid: &KeyGrid,
        items: usize,
        kv_heads: usize,
        q_len: usize,
        k_len: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> ChunkTile {
        let item = CUBE_POS_X as usize % items;
        let count = source.intervals.as_ref().unwrap().counts[item] as usize;
        let tiles = count.div_ceil(comptime!(bp.keys()));
        let before = CUBE_POS_X as usize / items;
        if before >= tiles {
            terminate!();
        }
        ChunkTile::new(
            source,
            grid,
            item,
            tiles - 1 - before,
            kv_heads,
            q_len,
            k_len,
            bp,
        )
    }

    /// Tile `tile` of chunk `item`, counted over all kv heads.
    fn new(
        source: &KeyTileSource,
        grid: &KeyGrid,
        item: usize,
        tile: usize,
        kv_heads: usize,
        q_len: usize,
        k_len: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> ChunkTile {
        let kv_row = item / grid.chunks as usize;
        let (batch, kv_head) = (kv_row / kv_heads, kv_row % kv_heads);
        let start = tile * comptime!(bp.keys());
        let chunk_first = (item % grid.chunks as usize * grid.chunk as usize) as i32;
        let chunk_end = min(chunk_first + grid.chunk as i32, q_len as i32);
        let mut count = k_len;
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
            q_len,
            k_len,
            chunk_first,
            chunk_end,
        }
    }

    /// How all queries are cut.
    pub(crate) fn chunks(&self, grid: &KeyGrid) -> QueryChunks {
        QueryChunks {
            q_len: self.q_len as u32,
            k_len: self.k_len as u32,
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
            row = self.kv_row * self.k_len + self.key_of(source, local, bp);
        }
        row
    }
}
