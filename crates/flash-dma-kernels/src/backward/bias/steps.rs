//! The steps of a cube of the kernel of the gradient of a bias: which heads and keys it multiplies, and what its
//! queries see of them.

use crate::backward::bias::blueprint::BiasBlueprint;
use crate::matrix::mask::until;
use crate::matrix::ptx::any_lane;
use crate::matrix::query_tile::TileRow;
use cubecl::prelude::*;
use flash_dma_problem::PlanGeometry;

const QUERY_BLOCK: usize = PlanGeometry::QUERY_BLOCK;
const KEY_BLOCK: usize = PlanGeometry::KEY_BLOCK;

/// Sizes of the problem, as scalars of the kernel.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Sizes {
    pub q_len: usize,
    pub k_len: usize,
    /// Query heads of a kv head.
    pub group: usize,
    /// Heads of the bias, query heads that read each of them, and these of all sequences that do.
    pub bias_heads: usize,
    pub heads_each: usize,
    pub steps_each: usize,
    /// Query heads that read one of the mask, and its rows from sequence to sequence: 0 broadcasts.
    pub mask_heads_each: usize,
    pub mask_batch: usize,
    /// Key blocks and queries of the mask's bits.
    pub bit_blocks: usize,
    pub bit_queries: usize,
}

/// The steps of a cube: of each of its key tiles, all heads of all sequences that share a row of the bias, one after
/// the other. Those of which the queries see nothing are left out.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BiasSteps {
    /// Key tiles, of which the last ones may have no step: `first..end`.
    pub first: usize,
    pub end: usize,
    /// Steps of all key tiles that causal masking leaves.
    pub total: usize,
    /// Of step 0.
    batch: usize,
    head: usize,
    /// The first query of the tile.
    pub first_query: usize,
    pub sizes: Sizes,
}

/// A step with something to see.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Found {
    /// The step; the number of steps or more if there is none.
    pub at: usize,
    /// Whether the mask shows its queries all of its keys, causal masking included; without a mask true.
    pub whole: bool,
}

/// What the queries of a tile see of a key tile by a plan: something, and all.
#[derive(CubeType, Clone, Copy)]
struct Visibility {
    some: bool,
    whole: bool,
}

/// One step.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BiasStep {
    pub key_tile: usize,
    pub batch: usize,
    pub head: usize,
    pub kv_head: usize,
}

#[cube]
impl BiasSteps {
    /// Those of cube `[run of key tiles, query tile from the last on, row of the bias]`, the runs of `run` tiles.
    pub(crate) fn new(sizes: Sizes, run: usize, #[comptime] bp: BiasBlueprint) -> BiasSteps {
        let keys = comptime!(BiasBlueprint::KEYS);
        let row = CUBE_POS_Z as usize;
        // The last queries see the most: they start first.
        let queries = comptime!(BiasBlueprint::QUERIES);
        let first_query = (sizes.q_len.div_ceil(queries) - 1 - CUBE_POS_Y as usize) * queries;
        let first = CUBE_POS_X as usize * run;
        let end = min(first + run, sizes.k_len.div_ceil(keys));
        let mut visible = sizes.k_len;
        if comptime!(bp.causal) {
            let last = min(first_query + queries, sizes.q_len) as i32;
            visible = max(last + sizes.k_len as i32 - sizes.q_len as i32, 0i32) as usize;
        }
        let visible = max(min(visible.div_ceil(keys), end), first);
        BiasSteps {
            first,
            end,
            total: (visible - first) * sizes.steps_each,
            batch: row / sizes.bias_heads,
            head: row % sizes.bias_heads * sizes.heads_each,
            first_query,
            sizes,
        }
    }

    /// Step `at`.
    pub(crate) fn step(&self, at: usize) -> BiasStep {
        let of_tile = at % self.sizes.steps_each;
        let head = self.head + of_tile % self.sizes.heads_each;
        BiasStep {
            key_tile: self.first + at / self.sizes.steps_each,
            batch: self.batch + of_tile / self.sizes.heads_each,
            head,
            kv_head: head / self.sizes.group,
        }
    }

    /// The key tile of step `at`; `end` or one behind it if there is none.
    pub(crate) fn key_tile(&self, at: usize) -> usize {
        select(
            at < self.total,
            self.first + at / self.sizes.steps_each,
            self.end,
        )
    }

    /// Step `at` by the plan's `counts`. All lanes of a warp call it.
    fn visibility(&self, counts: &[u32], at: usize) -> Visibility {
        let step = self.step(at);
        let row = self.mask_row(&step);
        let query_blocks = self.sizes.q_len.div_ceil(QUERY_BLOCK);
        let key_blocks = self.sizes.k_len.div_ceil(KEY_BLOCK);
        let keys = comptime!(BiasBlueprint::KEYS / KEY_BLOCK);
        let lane = UNIT_POS_X as usize;
        let query_block = self.first_query / QUERY_BLOCK + lane / keys;
        let key_block = step.key_tile * keys + lane % keys;
        let mut some = false;
        let mut hidden = false;
        if lane < comptime!(BiasBlueprint::QUERIES / QUERY_BLOCK * BiasBlueprint::KEYS / KEY_BLOCK)
            && query_block < query_blocks
            && key_block < key_blocks
        {
            let queries = min(self.sizes.q_len - query_block * QUERY_BLOCK, QUERY_BLOCK);
            let keys = min(self.sizes.k_len - key_block * KEY_BLOCK, KEY_BLOCK);
            let count = counts[(row * query_blocks + query_block) * key_blocks + key_block];
            some = count > 0;
            hidden = count < (queries * keys) as u32;
        }
        Visibility {
            some: any_lane(some),
            whole: !any_lane(hidden),
        }
    }

    /// The row of the mask that a step reads.
    fn mask_row(&self, step: &BiasStep) -> usize {
        step.head / self.sizes.mask_heads_each + step.batch * self.sizes.mask_batch
    }

    /// The first step from `from` on of which the queries see something.
    pub(crate) fn find(&self, counts: &[u32], from: usize, #[comptime] bp: BiasBlueprint) -> Found {
        let mut at = from;
        let mut whole = true;
        if comptime!(bp.pattern.is_planned()) {
            let mut searching = at < self.total;
            while searching {
                let visibility = self.visibility(counts, at);
                whole = visibility.whole;
                searching = false;
                if !visibility.some {
                    at += 1;
                    searching = at < self.total;
                }
            }
        }
        Found { at, whole }
    }

    /// What a row sees of key block `block`, a bit a key; `bits` are the plan's.
    pub(crate) fn seen(
        &self,
        bits: &[Vector<u32, Const<2>>],
        step: &BiasStep,
        row: &TileRow,
        block: usize,
        #[comptime] bp: BiasBlueprint,
    ) -> Vector<u32, Const<2>> {
        let mut words = Vector::<u32, Const<2>>::new(u32::new(comptime!(u32::MAX as i64)));
        if comptime!(bp.pattern.is_planned()) {
            // Rows past the last query and keys past the last get that one's, and are not used.
            let (blocks, queries) = (self.sizes.bit_blocks, self.sizes.bit_queries);
            let block = self.mask_row(step) * blocks + min(block, blocks - 1);
            words = bits[block * queries + min(row.query, queries - 1)];
        }
        until(words, row, block)
    }
}
