//! Into how many parts the keys of a query tile are split, so that few tiles fill a device, too.

use super::blueprint::{Instruction, MmaBlueprint};
use crate::lists::QueryTiles;
use flash_dma_problem::Problem;

impl MmaBlueprint {
    /// The cubes' size and the parts of the keys (1: not split) for the forward pass of `problem`, for which
    /// `self` was chosen.
    ///
    /// Parts are as many as the device holds cubes at once, no more, so that equal parts end together. A part of
    /// the longest tile has at least as many key tiles as the cube has warps: it costs the cube its queries, an
    /// empty pipeline, and an output of f32 that is written and read again, and the more rows the more of it.
    /// Of the sizes that so give three quarters of the multiprocessors a cube the largest is taken whose rows the
    /// queries fill by half: a key tile that is copied then serves the most rows.
    pub(crate) fn split(
        self,
        problem: &Problem,
        processors: usize,
        max_shared: usize,
    ) -> (Self, usize) {
        (self.sizes().iter())
            .map(|&warps| Self { warps, ..self })
            .filter(|cube| cube.shared_bytes() <= max_shared && cube.is_filled(problem))
            .map(|cube| (cube, cube.parts(problem, processors)))
            .find(|(cube, parts)| *parts > 1 && cube.cubes(problem) * parts >= processors * 3 / 4)
            .map_or_else(
                || self.in_parts(self.parts(problem, processors)),
                |(cube, parts)| cube.in_parts(parts),
            )
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
            // Registers of an output and two products under way: 128, 168 or 255.
            Instruction::Wgmma if self.head_dim <= 64 => &[16, 8, 4],
            Instruction::Wgmma if self.head_dim <= 128 => &[12, 8, 4],
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
        let most = keys.div_ceil(self.key_tile) / self.warps;
        let wanted = processors * self.resident() / self.cubes(problem).max(1);
        wanted.min(most).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_dma_problem::{AttentionOptions, ElementType};

    const PROCESSORS: usize = 132;
    const SHARED: usize = 227 << 10;

    /// What a problem of `[1, 32, q_len, 128]` queries and 8 kv heads gets: warps a cube, and parts.
    fn chosen(
        instruction: Instruction,
        q_len: usize,
        k_len: usize,
        window: Option<usize>,
    ) -> (usize, usize) {
        let (q, kv) = ([1, 32, q_len, 128], [1, 8, k_len, 128]);
        let options = AttentionOptions {
            keep_window: window,
            ..AttentionOptions::new()
        };
        let scores = window.map(|_| &kv[..3]);
        let problem = Problem::new(&q, &kv, &kv, scores, ElementType::Bf16, &options).unwrap();
        let smallest = MmaBlueprint {
            instruction,
            element: ElementType::Bf16,
            head_dim: 128,
            warps: 4,
            key_tile: 64,
            stages: 2,
            heads: 4,
            causal: true,
            sparse: window.is_some(),
            softcap: false,
            split: false,
        };
        let (blueprint, parts) = smallest.split(&problem, PROCESSORS, SHARED);
        assert_eq!(blueprint.split, parts > 1);
        (blueprint.warps, parts)
    }

    #[test]
    fn keys_of_few_queries_are_split_into_one_part_a_place_on_the_device() {
        for instruction in [Instruction::Mma, Instruction::Wgmma] {
            // One tile a kv head, 8 in all, and two cubes a multiprocessor.
            assert_eq!(chosen(instruction, 1, 32768, None), (4, 33));
            assert_eq!(chosen(instruction, 16, 32768, None), (4, 33));
        }
        // 128 rows of 8 warps fill a multiprocessor, 192 of 12.
        assert_eq!(chosen(Instruction::Mma, 128, 32768, None), (8, 4));
        assert_eq!(chosen(Instruction::Wgmma, 128, 32768, None), (12, 5));
    }

    #[test]
    fn a_part_has_as_many_key_tiles_as_its_cube_has_warps() {
        assert_eq!(chosen(Instruction::Mma, 1, 512, None), (4, 2));
        assert_eq!(chosen(Instruction::Mma, 1, 448, None), (4, 1));
        assert_eq!(chosen(Instruction::Mma, 1, 0, None), (4, 1));
        // A window of 2048 and 15 newborns are 33 key tiles.
        assert_eq!(chosen(Instruction::Mma, 1, 32768, Some(2048)), (4, 8));
        // The last of 64 key tiles are less than a part.
        assert_eq!(chosen(Instruction::Wgmma, 128, 4096, None), (12, 5));
    }

    #[test]
    fn many_tiles_are_left_alone() {
        // 176 cubes of 12 warps are more than the device holds; 88 are too many to be doubled, 128 of 8 are
        // half of what it holds.
        assert_eq!(chosen(Instruction::Wgmma, 1056, 32768, None), (4, 1));
        assert_eq!(chosen(Instruction::Wgmma, 512, 32768, None), (8, 2));
    }
}
