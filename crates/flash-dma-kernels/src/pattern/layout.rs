//! The headers of the lists that kernels stream: the writers and the readers of a list import them from here.

use flash_dma_problem::PlanGeometry;

/// Words before the counts.
pub(crate) const TILE_LIST_HEADER: usize = 4;

/// Words per tile in the counts.
pub(crate) const TILE_LIST_WORDS: usize = 4;

/// Keys per block.
pub(crate) const KEY_BLOCK: usize = PlanGeometry::KEY_BLOCK;

/// Words before the counts. They are strides, 0 where an axis broadcasts: in lists, between sequences and between kv
/// heads; in rows of the mask, between sequences, between kv heads and between query heads of a group; in pairs of
/// words, between rows of the mask, between key blocks and between queries.
pub(crate) const QUERY_LIST_HEADER: usize = 8;

/// Bits of a list entry below the query tile: the index of the group of heads that share a tile.
pub(crate) const HEAD_BITS: usize = 8;
