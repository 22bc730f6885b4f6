//! The headers of the lists that kernels stream: whoever writes a list and whoever reads it import them from here.

use flash_dma_problem::PlanGeometry;

/// Words in front of the counts.
pub(crate) const TILE_LIST_HEADER: usize = 4;

/// Words of a tile in the counts.
pub(crate) const TILE_LIST_WORDS: usize = 4;

/// Keys of a block.
pub(crate) const KEY_BLOCK: usize = PlanGeometry::KEY_BLOCK;

/// Words in front of the counts, steps of 0 where an axis broadcasts: in lists, from sequence to sequence and from kv
/// head to kv head; in rows of the mask the same and from query head to query head of a group; in pairs of words from
/// row to row of the mask, from key block to key block and from query to query.
pub(crate) const QUERY_LIST_HEADER: usize = 8;

/// Bits of an entry of a list below the query tile: which heads of the group, in tiles' worth.
pub(crate) const HEAD_BITS: usize = 8;
