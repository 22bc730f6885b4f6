//! Into how many parts the keys of a query tile are split, so that few tiles fill a device, too.

use super::blueprint::{Instruction, MmaBlueprint};
use crate::lists::QueryTiles;
use cubecl::prelude::DeviceProperties;
use flash_dma_problem::Problem;

/// Key tiles that a part should have at least: a part costs a cube its queries, an empty pipeline and an
/// output of f32 that is written and read again.
const LEAST_KEY_TILES: usize = 8;

impl MmaBlueprint {
    /// The cubes' size and the parts of the keys (1: not split) for the forward pass of `problem`, for which
    /// `self` was chosen.
    ///
    /// Problems with at least as many cubes as multiprocessors are left alone. Others take the largest cube
    /// whose rows the queries can fill by half and which, with each tile's keys in parts of 8 key tiles or
    /// more, gives every multiprocessor work: a key tile that is copied then serves the most rows. Parts are
    /// as many as the multiprocessors hold cubes at once, no more: equal parts end together.
    pub(crate) fn split(self, problem: &Problem, properties: &DeviceProperties) -> (Self, usize) {
        let processors = properties
            .hardware
            .num_streaming_multiprocessors
            .unwrap_or(1) as usize;
        if self.cubes(problem) >= processors {
            return (self, 1);
        }
        let fits = |candidate: &Self| {
            candidate.shared_bytes() <= properties.hardware.max_shared_memory_size
        };
        let choices = (self.sizes().iter())
            .map(|&warps| Self { warps, ..self })
            .filter(|candidate| fits(candidate) && candidate.is_filled(problem))
            .map(|candidate| (candidate, candidate.parts(problem, processors)));
        let fills = |&(candidate, parts): &(Self, usize)| {
            parts > 1 && candidate.cubes(problem) * parts >= processors * 3 / 4
        };
        let (candidate, parts) = choices
            .clone()
            .find(fills)
            .unwrap_or_else(|| (self, self.parts(problem, processors)));
        candidate.in_parts(parts)
    }

    /// The configuration for `parts` parts of every tile's keys.
    pub(crate) fn in_parts(self, parts: usize) -> (Self, usize) {
        let split = parts > 1;
        (Self { split, ..self }, parts)
    }

    /// Warps that a cube may have, the most first.
    pub(crate) fn sizes(&self) -> &'static [usize] {
        match self.instruction {
            Instruction::Mma => &[8, 4],
            Instruction::Wgmma if self.head_dim <= 128 => &[16, 8, 4],
            Instruction::Wgmma => &[8, 4],
        }
    }

    /// Query tiles of all heads.
    pub(crate) fn cubes(&self, problem: &Problem) -> usize {
        let heads = problem.batch * problem.q_heads / self.heads;
        problem.q_len.div_ceil(self.queries()) * heads
    }

    /// Whether a smaller cube would leave queries over.
    fn is_filled(&self, problem: &Problem) -> bool {
        self.warps == 4 || problem.q_len > self.queries() / 2
    }

    /// Cubes that a multiprocessor holds at once: 512 units of 128 registers fill one, as do 256 units of 255.
    fn resident(&self) -> usize {
        let units = match self.instruction {
            Instruction::Mma => 256,
            Instruction::Wgmma => 512,
        };
        (units / self.units()).clamp(1, 2)
    }

    fn parts(&self, problem: &Problem, processors: usize) -> usize {
        let tiles = QueryTiles::new(problem, self.queries());
        let keys = if self.sparse {
            tiles.capacity
        } else {
            problem.k_len
        };
        let most = keys.div_ceil(self.key_tile) / LEAST_KEY_TILES;
        let wanted = processors * self.resident() / self.cubes(problem).max(1);
        wanted.min(most).max(1)
    }
}
