//! The number of parts into which the keys of a query tile are split, so that even few tiles fill a device.

use crate::args::Outputs;
use crate::host::engine::Instruction;
use crate::matrix::blueprint::MmaBlueprint;
use crate::pattern::intervals::tiles::QueryTiles;
use flash_dma_problem::Problem;

impl MmaBlueprint {
    /// The cubes' size and the number of parts of the keys (1: not split) for the forward pass of `problem`, for which
    /// `self` was chosen: the combination that [`MmaBlueprint::time`] expects to finish first. If there is enough work
    /// for more than the smallest cube, nothing is changed.
    pub(crate) fn split(
        self,
        problem: &Problem,
        processors: usize,
        max_shared: usize,
    ) -> (Self, usize) {
        if Some(&self.warps) != self.sizes().last() {
            return (self, 1);
        }
        let candidates = (self.sizes().iter())
            .map(|&warps| Self { warps, ..self })
            .filter(|cube| cube.shared_bytes() <= max_shared && cube.is_filled(problem))
            .flat_map(|cube| {
                let places = processors * cube.resident(max_shared);
                // The bound of twice the cubes that the device holds at once limits the memory of the parts.
                let most = 2 * places / cube.cubes(problem).max(1);
                (1..=most.max(1)).map(move |parts| (cube, parts, places))
            });
        let (cube, parts, _) = candidates
            .min_by_key(|(cube, parts, places)| cube.time(problem, *parts, *places))
            .unwrap_or((self, 1, 1));
        cube.in_parts(parts)
    }

    /// The configuration for `parts` parts of every tile's keys.
    pub(crate) fn in_parts(self, parts: usize) -> (Self, usize) {
        let split = parts > 1;
        let cube = Self {
            split,
            rest: self.rest || split,
            ..self
        };
        (cube, parts)
    }

    /// The configuration of a pass that writes `outputs` in the end, of parts or not.
    pub(crate) fn with_outputs(self, outputs: &Outputs) -> Self {
        Self {
            residual: outputs.residual.is_some(),
            rest: outputs.lse_rest.is_some() || self.split,
            ..self
        }
    }

    /// Possible numbers of warps per cube, the largest first.
    pub(crate) fn sizes(&self) -> &'static [usize] {
        match self.instruction {
            Instruction::Mma => &[8, 4],
            // Registers of an output and two products in flight: 128, 168 or 255.
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

    /// True if a smaller cube would leave queries over.
    fn is_filled(&self, problem: &Problem) -> bool {
        self.warps == 4 || problem.q_len > self.queries() / 2
    }

    /// Number of cubes that a multiprocessor holds at once, at most two: 512 units of 128 registers fill one, as do 256
    /// units of 255, and so does their shared memory.
    fn resident(&self, max_shared: usize) -> usize {
        let units = match self.instruction {
            Instruction::Mma => 256,
            Instruction::Wgmma => 512,
        };
        (units / self.units())
            .min(max_shared / self.shared_bytes())
            .clamp(1, 2)
    }

    /// Estimated time of a pass with its keys in `parts` parts on a device that holds `places` cubes at once, in units
    /// of 0.1 us on an H200; only the order of these times matters.
    ///
    /// The longest tiles start first, so the last cube ends one part of the longest and one part of a mean tile for
    /// each further wave after the start. A split pass has one launch more, and f32 outputs that are read again.
    fn time(&self, problem: &Problem, parts: usize, places: usize) -> usize {
        let (longest, mean) = self.key_tiles(problem);
        let waves = (self.cubes(problem) * parts).div_ceil(places).max(1);
        let tiles = longest.div_ceil(parts) + (waves - 1) * mean.div_ceil(parts);
        // Measured at head dimensions of 64 and 128, for tiles of 64 keys on `wgmma`; a copied tile is shared by all rows, so
        // more rows cost little.
        let time = match self.instruction {
            Instruction::Mma => tiles * (12 + self.warps),
            Instruction::Wgmma => tiles * (7 + self.warps * 3 / 4) * self.key_tile / 64,
        };
        let rows = problem.batch * problem.q_heads * problem.q_len;
        let merging = match parts {
            1 => 0,
            _ => 80 + parts * rows / 256,
        };
        // A wave begins with its queries and an empty pipeline, and ends with its outputs.
        time + waves * 60 + merging
    }

    /// Key tiles of the longest and of a mean query tile.
    fn key_tiles(&self, problem: &Problem) -> (usize, usize) {
        let tiles = |keys: usize| keys.div_ceil(self.key_tile);
        if self.pattern.has_intervals() {
            let most = tiles(QueryTiles::new(problem, self.queries()).capacity);
            return (most, most);
        }
        let shortest = match self.causal {
            true => problem.k_len.saturating_sub(problem.q_len),
            false => problem.k_len,
        };
        (tiles(problem.k_len), tiles((problem.k_len + shortest) / 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::kind::Pattern;
    use crate::testing::problem;
    use flash_dma_problem::{AttentionOptions, ElementType};

    const PROCESSORS: usize = 132;
    const SHARED: usize = 227 << 10;

    /// The choice for a problem of `[1, heads, q_len, head_dim]` queries: warps per cube, and parts.
    fn chosen(
        instruction: Instruction,
        [heads, kv_heads, head_dim]: [usize; 3],
        [q_len, k_len]: [usize; 2],
        window: Option<usize>,
    ) -> (usize, usize) {
        let options = AttentionOptions {
            keep_window: window,
            ..AttentionOptions::new()
        };
        let (q, kv) = ([1, heads, q_len, head_dim], [kv_heads, k_len]);
        let problem = problem(q, kv, window.is_some(), ElementType::Bf16, &options);
        let pattern = Pattern::scored(&problem);
        let smallest = MmaBlueprint::of(instruction, &problem, pattern, problem.group(), 4);
        let (blueprint, parts) = smallest.split(&problem, PROCESSORS, SHARED);
        assert_eq!(blueprint.split, parts > 1);
        (blueprint.warps, parts)
    }

    fn layer(instruction: Instruction, q_len: usize, k_len: usize) -> (usize, usize) {
        chosen(instruction, [32, 8, 128], [q_len, k_len], None)
    }

    #[test]
    fn keys_of_few_queries_are_split_into_one_part_a_place_on_the_device() {
        for q_len in [1, 16] {
            // One tile per kv head, 8 in all; shared memory holds two cubes of mma, one of wgmma.
            assert_eq!(layer(Instruction::Mma, q_len, 32768), (4, 32));
            assert_eq!(layer(Instruction::Wgmma, q_len, 32768), (4, 16));
        }
        assert_eq!(layer(Instruction::Wgmma, 128, 32768), (12, 5));
        // 88 tiles in 3 parts are two whole waves.
        assert_eq!(layer(Instruction::Wgmma, 512, 32768), (12, 3));
    }

    #[test]
    fn small_problems_take_the_sizes_that_were_measured_fast() {
        let small = |len, window| chosen(Instruction::Wgmma, [2, 1, 64], [len, len], window);
        assert_eq!(small(1024, None), (4, 4));
        assert_eq!(small(2048, None), (4, 4));
        assert_eq!(small(4096, None), (8, 4));
        // A few key tiles are not worth a second launch.
        assert_eq!(small(4096, Some(1024)), (4, 1));
        assert_eq!(layer(Instruction::Wgmma, 1, 448), (4, 1));
        assert_eq!(layer(Instruction::Wgmma, 1, 0), (4, 1));
    }

    #[test]
    fn parts_are_at_most_twice_what_the_device_holds() {
        for q_len in [1, 100, 500, 1500] {
            for (k_len, window) in [(2000, None), (1 << 19, None), (1 << 19, Some(1 << 16))] {
                let lengths = [q_len, k_len];
                let (warps, parts) = chosen(Instruction::Wgmma, [32, 8, 128], lengths, window);
                let cubes = q_len.div_ceil(4 * warps) * 8;
                let fits = parts == 1 || cubes * parts <= 2 * PROCESSORS;
                assert!(fits, "{lengths:?}");
            }
        }
    }
}
