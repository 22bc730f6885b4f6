//! The steps of a cube of the bias-gradient kernel: the heads and keys that it multiplies and that its queries see.

use crate::backward::bias::blueprint::BiasBlueprint;
use crate::matrix::mask::until;
use crate::matrix::ptx::any_lane;
use crate::matrix::rows::TileRow;
use crate::pattern::position::end_key;
use cubecl::prelude::*;
use flash_dma_problem::PlanGeometry;

const QUERY_BLOCK: usize = PlanGeometry::QUERY_BLOCK;
const KEY_BLOCK: usize = PlanGeometry::KEY_BLOCK;

/// Sizes of the problem, as scalars of the kernel.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Sizes {
    pub q_len: usize,
    pub k_len: usize,
    pub group: usize,
    /// Heads of the bias, query heads that read each of them, and the total of these over all sequences that read it.
    pub bias_heads: usize,
    pub heads_each: usize,
    pub steps_each: usize,
    /// Query heads that read one head of the mask, and the mask's row stride between sequences: 0 broadcasts.
    pub mask_heads_each: usize,
    pub mask_batch: usize,
    /// Key blocks and queries of the mask's bits.
    pub bit_blocks: usize,
    pub bit_queries: usize,
}

/// The tensors of a tile plan, see [`MaskBits`](crate::pattern::mask::args::MaskBits).
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PlanTensors {
    pub bits: Box<[Vector<u32, Const<2>>]>,
    pub counts: Box<[u32]>,
}

/// The steps of a cube: for each of its key tiles in order, all heads of all sequences that share a row of the bias.
/// Steps whose queries see nothing are skipped.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BiasSteps {
    /// Key tiles `first..end`; the last may have no step.
    pub first: usize,
    pub end: usize,
    /// Number of steps of all key tiles that causal masking leaves.
    pub total: usize,
    /// The position of step 0.
    batch: usize,
    head: usize,
    pub first_query: usize,
    pub sizes: Sizes,
    #[cube(comptime)]
    pub bp: BiasBlueprint,
}

/// A step whose queries see something.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Found {
    /// The step's index; at least the number of steps if there is none.
    pub at: usize,
    /// True if the mask shows all of its keys to its queries, causal masking included; also without a mask.
    pub full: bool,
}

/// Flags by the plan: the queries of a tile see some, and all, of a key tile.
#[derive(CubeType, Clone, Copy)]
struct Visibility {
    some: bool,
    full: bool,
}

#[derive(CubeType, Clone, Copy)]
pub(crate) struct BiasStep {
    pub key_tile: usize,
    pub batch: usize,
    pub head: usize,
    pub kv_head: usize,
    /// [`Found::full`].
    pub full: bool,
}

#[cube]
impl BiasSteps {
    /// The steps of cube `[run of key tiles, query tile from the last on, row of the bias]`, with runs of `run` tiles.
    pub(crate) fn new(sizes: Sizes, run: usize, #[comptime] bp: BiasBlueprint) -> BiasSteps {
        let keys = comptime!(BiasBlueprint::KEYS);
        let row = CUBE_POS_Z as usize;
        // The last queries see the most keys, so they start first.
        let queries = comptime!(BiasBlueprint::QUERIES);
        let first_query = (sizes.q_len.div_ceil(queries) - 1 - CUBE_POS_Y as usize) * queries;
        let first = CUBE_POS_X as usize * run;
        let end = min(first + run, sizes.k_len.div_ceil(keys));
        let mut visible = sizes.k_len;
        if comptime!(bp.causal) {
            let last = min(first_query + queries, sizes.q_len) - 1;
            visible = max(end_key(last, sizes.q_len, sizes.k_len, bp.causal), 0i32) as usize;
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
            bp,
        }
    }

    pub(crate) fn step(&self, found: &Found) -> BiasStep {
        self.step_at(found.at, found.full)
    }

    fn step_at(&self, at: usize, full: bool) -> BiasStep {
        let of_tile = at % self.sizes.steps_each;
        let head = self.head + of_tile % self.sizes.heads_each;
        BiasStep {
            key_tile: self.first + at / self.sizes.steps_each,
            batch: self.batch + of_tile / self.sizes.heads_each,
            head,
            kv_head: head / self.sizes.group,
            full,
        }
    }

    /// The key tile of step `at`; `end` or one past it if there is none.
    pub(crate) fn key_tile(&self, at: usize) -> usize {
        select(
            at < self.total,
            self.first + at / self.sizes.steps_each,
            self.end,
        )
    }

    /// The visibility of step `at` by the plan's `counts`. All lanes of a warp must call it.
    fn visibility(&self, counts: &[u32], at: usize) -> Visibility {
        let step = self.step_at(at, false);
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
            full: !any_lane(hidden),
        }
    }

    fn mask_row(&self, step: &BiasStep) -> usize {
        step.head / self.sizes.mask_heads_each + step.batch * self.sizes.mask_batch
    }

    /// The first step from `from` on whose queries see something.
    pub(crate) fn find(&self, plan: &ComptimeOption<PlanTensors>, from: usize) -> Found {
        let mut at = from;
        let mut full = true;
        #[comptime]
        match plan {
            ComptimeOption::Some(plan) => {
                let mut searching = at < self.total;
                while searching {
                    let visibility = self.visibility(&plan.counts, at);
                    full = visibility.full;
                    searching = false;
                    if !visibility.some {
                        at += 1;
                        searching = at < self.total;
                    }
                }
            }
            ComptimeOption::None => {}
        }
        Found { at, full }
    }

    /// The keys of key block `block` that a row sees, one bit per key.
    pub(crate) fn seen(
        &self,
        plan: &ComptimeOption<PlanTensors>,
        step: &BiasStep,
        row: &TileRow,
        block: usize,
    ) -> Vector<u32, Const<2>> {
        let mut words = Vector::<u32, Const<2>>::new(u32::new(comptime!(u32::MAX as i64)));
        #[comptime]
        match plan {
            ComptimeOption::Some(plan) => {
                // Rows past the last query and keys past the last key read the last one's bits, and are not used.
                let (blocks, queries) = (self.sizes.bit_blocks, self.sizes.bit_queries);
                let block = self.mask_row(step) * blocks + min(block, blocks - 1);
                words = plan.bits[block * queries + min(row.query, queries - 1)];
            }
            ComptimeOption::None => {}
        }
        until(words, row, block)
    }
}
