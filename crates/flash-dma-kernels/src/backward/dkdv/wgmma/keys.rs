//! The two keys that a lane of a warpgroup holds rows of.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::KeyTileSource;
use crate::backward::dkdv::shared::chunk_tile::ChunkTile;
use crate::backward::dkdv::shared::keys::{OwnKey, own_key, score_row};
use crate::backward::dkdv::shared::mask::KeyMask;
use cubecl::prelude::*;

/// Rows `lane / 4` and `lane / 4 + 8` of the warp's sixteen.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LaneKeys {
    pub upper: OwnKey,
    pub lower: OwnKey,
    #[cube(comptime)]
    pub bp: DkdvBlueprint,
}

#[cube]
impl LaneKeys {
    /// The keys with the scores that all heads of the group share.
    pub(crate) fn new(
        source: &KeyTileSource,
        place: &ChunkTile,
        #[comptime] bp: DkdvBlueprint,
    ) -> LaneKeys {
        let score_row = score_row(source, place, bp);
        let local = UNIT_POS_Y as usize * 16 + UNIT_POS_X as usize / 4;
        let scored = comptime!(bp.pattern.has_shared_score());
        LaneKeys {
            upper: own_key(local, place, source, score_row, scored, bp),
            lower: own_key(local + 8, place, source, score_row, scored, bp),
            bp,
        }
    }

    /// Sets the keys' biases for head `head` of the group.
    pub(crate) fn load_biases(&mut self, mask: &KeyMask, head: usize) {
        self.upper.bias(mask, head);
        self.lower.bias(mask, head);
    }
}
