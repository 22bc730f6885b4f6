//! The layout of the lists and bit words (one bit per key) that kernels stream, for writers and readers alike.

use cubecl::prelude::*;
use flash_dma_problem::PlanGeometry;

/// Words before the counts.
pub(crate) const TILE_LIST_HEADER: usize = 4;

/// Words per tile in the counts.
pub(crate) const TILE_LIST_WORDS: usize = 4;

pub(crate) const KEY_BLOCK: usize = PlanGeometry::KEY_BLOCK;

/// Words before the counts. They are strides, 0 where an axis broadcasts: in lists, between sequences and between kv
/// heads; in rows of the mask, between sequences, between kv heads and between query heads of a group; in pairs of
/// words, between rows of the mask, between key blocks and between queries.
pub(crate) const QUERY_LIST_HEADER: usize = 8;

/// Bits of a list entry below the query tile: the index of the group of heads that share a tile.
pub(crate) const HEAD_BITS: usize = 8;

/// The lowest `count` bits of a word: none from 0 down, all from 32 up.
#[cube]
pub(crate) fn first_bits(count: i32) -> u32 {
    // Avoids a shift by 32, which no target defines.
    let shift = 32 - clamp(count, 1i32, 32i32);
    select(count > 0, 0xFFFF_FFFFu32 >> shift as u32, 0u32)
}

/// The nonzero bytes among the four of a word, one bit each.
#[cube]
pub(crate) fn nonzero_bytes(word: u32) -> u32 {
    // Bit 7 of each byte: its low bits carry into it unless all are 0.
    let flags = (((word & 0x7F7F_7F7Fu32) + 0x7F7F_7F7Fu32) | word) & 0x8080_8080u32;
    // The product moves bits 7, 15, 23, 31 to 28..=31, and no two bits to the same place, so nothing carries.
    (flags * 0x0020_4081u32) >> 28u32
}
