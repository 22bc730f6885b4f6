//! The comptime configurations of the tensor-core backward kernels of a problem.

use crate::args::{Saved, Selection};
use crate::backward::dkdv::blueprint::{ChunkedBlueprint, DkdvBlueprint};
use crate::backward::dq::blueprint::DqBlueprint;
use crate::host::engine::Instruction;
use crate::matrix::blueprint::{MmaBlueprint, processors};
use cubecl::prelude::*;
use flash_dma_problem::{MaskedProblem, Obstacle, Problem};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaBlueprints {
    pub dq: DqBlueprint,
    pub dkdv: ChunkedBlueprint,
    /// The rank kernel's blueprint; with scores only.
    pub rank: Option<ChunkedBlueprint>,
}

impl MmaBlueprints {
    /// The configuration for `problem` on an instruction, or the reason why it is not supported.
    pub(crate) fn choose(
        instruction: Instruction,
        problem: &Problem,
        properties: &DeviceProperties,
    ) -> Result<Self, Obstacle> {
        let shared = properties.hardware.max_shared_memory_size;
        let tile = MmaBlueprint::choose(instruction, problem, properties)?;
        let dq = DqBlueprint::choose(tile, shared)?;
        let dkdv = DkdvBlueprint::choose(instruction, problem, shared)?;
        let rank = match problem.has_scores {
            true => Some(dkdv.choose_rank(problem, shared)?.with_rank_chunks(problem)),
            false => None,
        };
        Ok(Self::with_tiles(dq, dkdv, rank, problem, properties))
    }

    /// [`choose`](Self::choose) for a problem with a mask or a bias. `mma` supports biases that all queries share; so
    /// does `wgmma` with dropout.
    pub(crate) fn choose_masked(
        instruction: Instruction,
        problem: &MaskedProblem,
        properties: &DeviceProperties,
    ) -> Result<Self, Obstacle> {
        let (p, shared) = (
            &problem.attention,
            properties.hardware.max_shared_memory_size,
        );
        let tile = MmaBlueprint::choose_masked(instruction, problem, properties)?;
        if tile.pattern.has_pair_bias() {
            if instruction == Instruction::Mma {
                return Err(Obstacle::PairBias);
            }
            if tile.dropout {
                // dk/dv has no registers for both the biases and the words: ptxas would serialise its products (C7515).
                return Err(Obstacle::DroppedPairBias);
            }
            if tile.alibi {
                return Err(Obstacle::AlibiPairBias);
            }
        }
        let dq = DqBlueprint::choose(tile, shared)?;
        let dkdv = DkdvBlueprint::choose_masked(instruction, problem, shared)?;
        Ok(Self::with_tiles(dq, dkdv, None, p, properties))
    }

    /// The configuration in which the dk/dv kernel also sums what kept keys learn, where it can: it has the products and
    /// the probabilities of every kept pair, so a rank kernel need not compute them again. It has no registers for the
    /// gradients of scores as well, nor for those of the LSEs; a dropped pair learns, but has no gradient; and a fixed
    /// order has a kernel of its own that adds the parts.
    pub(crate) fn with_kept(
        mut self,
        problem: &Problem,
        selection: Option<&Selection>,
        saved: &Saved,
    ) -> Self {
        let learning = selection.and_then(|selection| selection.learning.as_ref());
        let tiles = &mut self.dkdv.tiles;
        tiles.kept = tiles.instruction == Instruction::Wgmma
            && learning.is_some_and(|learning| learning.kept_from.is_some())
            && !(problem.scores_learn || tiles.dropout || tiles.parts)
            && saved.grad_lse.is_none();
        self
    }

    fn with_tiles(
        dq: DqBlueprint,
        dkdv: DkdvBlueprint,
        rank: Option<ChunkedBlueprint>,
        problem: &Problem,
        properties: &DeviceProperties,
    ) -> Self {
        let dkdv = dkdv.with_chunks(problem);
        let all = Self { dq, dkdv, rank };
        match dkdv.tiles.instruction {
            Instruction::Mma => all,
            Instruction::Wgmma => all.spread(problem, processors(properties)),
        }
    }

    /// Uses key tiles of 64 keys if tiles of 128 would be too few to fill the device.
    fn spread(self, problem: &Problem, processors: usize) -> Self {
        let mut all = self;
        if all.key_tiles(problem) < 4 * processors {
            all.dkdv.tiles.fragments = 1;
        }
        if let Some(rank) = &mut all.rank {
            let rows = problem.batch * problem.kv_heads;
            let chunks = rank.chunks(problem);
            // A layer's default is a quarter of the window; some more keys begin or end in a chunk.
            let keys = (problem.window / 4 + rank.chunk / 2).min(problem.k_len);
            // A processor holds one tile of either size, and with 64 keys has nothing to overlap its loads with.
            if chunks * rows * keys.div_ceil(rank.tiles.keys()) < processors {
                rank.tiles.fragments = 1;
            }
        }
        all
    }
}
