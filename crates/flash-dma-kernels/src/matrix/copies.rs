//! Which segments of a tile a unit copies.

use cubecl::prelude::*;

/// A segment of a tile.
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
