//! Which chunks of a tile a unit copies.

use cubecl::prelude::*;

/// A chunk of a tile.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TileChunk {
    pub row: usize,
    pub col: usize,
}

/// The `c`-th chunk that this unit, of `units`, copies of every tile whose rows have `chunks`; its row may lie
/// past the tile's last.
#[cube]
pub(crate) fn copied_chunk(
    #[comptime] c: usize,
    #[comptime] units: usize,
    #[comptime] chunks: usize,
) -> TileChunk {
    let unit = UNIT_POS as usize;
    if comptime!(units.is_multiple_of(chunks)) {
        // The same column each time, which saves most of the address arithmetic.
        TileChunk {
            row: unit / chunks + comptime!(c * units / chunks),
            col: unit % chunks,
        }
    } else {
        let at = unit + comptime!(c * units);
        TileChunk {
            row: at / chunks,
            col: at % chunks,
        }
    }
}
