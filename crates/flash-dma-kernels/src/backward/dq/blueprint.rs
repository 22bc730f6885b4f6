//! The comptime configuration of the dq kernel, and its choice.

use crate::backward::dkdv::blueprint::check_wgmma_dim;
use crate::host::engine::Instruction;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::mma::Shape;
use flash_dma_problem::Obstacle;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DqBlueprint {
    /// Query tile and key stream, as in the forward pass.
    pub tile: MmaBlueprint,
    /// True if the rows of Q and dO stay in registers; otherwise their fragments are loaded for each use.
    pub resident: bool,
}

/// Keys whose logits and gradients a warp of the dq kernel holds at once.
pub(crate) const DQ_BLOCK: usize = 32;

/// Up to this head dimension there are registers left for the fragments of Q and dO.
const RESIDENT_DIM: usize = 128;

impl DqBlueprint {
    /// The configuration for the query tiles of a forward pass.
    ///
    /// - `mma`: the largest tiles that fit: with more queries each gathered key is reused more often, and 64 keys keep
    ///   the tensor cores busy between two barriers. A third stage was measured 6 % slower at a head dimension of 128.
    /// - `wgmma`: at most three warpgroups, of 168 registers: dQ and two products take 128 of them at head dimension
    ///   128. Three stages, so that one warpgroup may be ahead of another; Q and dO leave no room for a fourth. Biases
    ///   per pair, loaded while the products are in flight, take 32 more registers, so there are two warpgroups.
    pub(crate) fn choose(tile: MmaBlueprint, max_shared: usize) -> Result<Self, Obstacle> {
        let with = |warps: usize, key_tile, stages, resident| Self {
            tile: MmaBlueprint {
                warps: warps.min(tile.warps),
                key_tile,
                stages,
                ..tile
            },
            resident,
        };
        let fitting = match tile.instruction {
            Instruction::Mma => [(tile.warps, 64), (tile.warps, 32), (4, 64), (4, 32)]
                .into_iter()
                .map(|(warps, keys)| with(warps, keys, 2, tile.head_dim <= RESIDENT_DIM))
                .find(|blueprint| blueprint.shared_bytes() <= max_shared),
            Instruction::Wgmma => {
                check_wgmma_dim(tile.head_dim)?;
                let warps = if tile.pattern.has_pair_bias() { 8 } else { 12 };
                Some(with(warps, 64, 3, false))
                    .filter(|blueprint| blueprint.shared_bytes() + 4096 <= max_shared)
            }
        };
        fitting.ok_or(Obstacle::SharedMemory)
    }

    /// The products of a warp's rows with [`DQ_BLOCK`] keys.
    pub(crate) fn products(&self) -> Shape {
        Shape {
            element: self.tile.element,
            fragments: 1,
            blocks: DQ_BLOCK / 16,
            columns: self.tile.head_dim,
            transposed: false,
            column: 0,
            cleaned: false,
        }
    }

    /// Bytes of Q and dO, and of keys, values, scores and intervals of every stage.
    fn shared_bytes(&self) -> usize {
        let row = 2 * self.tile.head_dim;
        let words = 4 + 4 * self.tile.column_words();
        let stage = self.tile.key_tile * (2 * row + words) + 8 * self.tile.stage_intervals();
        2 * self.tile.tile_rows() * row + self.tile.stages * stage + 6 * 128
    }
}
