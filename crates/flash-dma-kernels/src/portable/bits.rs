//! Visibility by a word of bits per query, and the bias of a pair.

use crate::pattern::layout::first_bits;
use crate::pattern::position::{end_key, query_shift};
use crate::portable::args::{PairBiasArg, Sizes, TilePlan};
use crate::portable::blueprint::Blueprint;
use crate::portable::memory::TileRows;
use crate::portable::visibility::{is_blind, query_and_key};
use cubecl::prelude::*;

/// Queries that share a count of a tile plan.
const PLAN_QUERIES: usize = 16;
/// Keys that share a count of a tile plan.
const PLAN_KEYS: usize = 64;

/// The keys of a tile, at most 32, that each query of a tile attends to: one word per query in shared memory.
#[derive(CubeType)]
pub(crate) struct QueryBits<'a> {
    words: Shared<[u32]>,
    /// The mask; without one, all keys up to a query's position are visible.
    plan: ComptimeOption<&'a TilePlan>,
    bias: ComptimeOption<PairBias<'a>>,
    /// True if the keys are the outer rows.
    #[cube(comptime)]
    keys_outer: bool,
}

#[cube]
impl<'a> QueryBits<'a> {
    /// Allocates room for the queries of a tile.
    pub(crate) fn new(
        plan: ComptimeOption<&'a TilePlan>,
        bias: &'a PairBiasArg,
        #[comptime] keys_outer: bool,
        #[comptime] bp: Blueprint,
    ) -> QueryBits<'a> {
        QueryBits::<'a> {
            words: Shared::<[u32]>::new_slice(comptime!(bp.rows(!keys_outer))),
            plan,
            bias: PairBias::of(bias),
            keys_outer,
        }
    }

    /// True if the plan's counts of the blocks of a tile are not all zero.
    pub(crate) fn is_active(
        &self,
        queries: &TileRows,
        keys: &TileRows,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) -> bool {
        #[comptime]
        match self.plan {
            ComptimeOption::Some(plan) => {
                let row = self.plan_row(queries, sizes);
                let (query_blocks, key_blocks) = (plan.counts.shape(2), plan.counts.shape(3));
                let end = min(
                    queries.first + comptime!(bp.rows(!self.keys_outer)),
                    queries.end,
                );
                let mut sum = 0u32;
                for block in queries.first / PLAN_QUERIES..end.div_ceil(PLAN_QUERIES) {
                    let at = (row * query_blocks + block) * key_blocks + keys.first / PLAN_KEYS;
                    sum += plan.counts[at];
                }
                sum > 0
            }
            ComptimeOption::None => true,
        }
    }

    /// Sets the keys of a tile that each query of a tile sees. All units cooperate; the caller synchronises.
    pub(crate) fn set(
        &mut self,
        queries: &TileRows,
        keys: &TileRows,
        lse: ComptimeOption<&Shared<[f32]>>,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) {
        #[comptime]
        match &mut self.bias {
            ComptimeOption::Some(bias) => bias.place(queries, keys, sizes),
            ComptimeOption::None => {}
        }
        let plan_row = self.plan_row(queries, sizes);
        let mut row = UNIT_POS as usize;
        while row < comptime!(bp.rows(!self.keys_outer)) {
            let query = queries.first + row;
            let mut word = 0u32;
            if query < queries.end && !is_blind(lse, row) {
                let end = end_key(query, sizes.q_len, sizes.k_len, bp.causal);
                word = first_bits(end - keys.first as i32);
                word = self.masked(word, plan_row, query, keys.first);
            }
            self.words[row] = word;
            row += comptime!(bp.units());
        }
    }

    /// The row of the plan's batches and heads that a tile of queries reads.
    fn plan_row(&self, queries: &TileRows, sizes: &Sizes) -> usize {
        #[comptime]
        match self.plan {
            ComptimeOption::Some(plan) => {
                let heads = plan.bits.shape(1);
                let mut row = queries.head / (sizes.q_heads / heads);
                if plan.bits.shape(0) > 1 {
                    row += queries.batch * heads;
                }
                row
            }
            ComptimeOption::None => 0usize,
        }
    }

    /// The bits of `word`, for the keys from `first_key` on, that row `row` of the plan leaves.
    fn masked(&self, word: u32, row: usize, query: usize, first_key: usize) -> u32 {
        #[comptime]
        match self.plan {
            ComptimeOption::Some(plan) => {
                let (blocks, queries) = (plan.bits.shape(2), plan.bits.shape(3));
                let mut block = first_key / PLAN_KEYS;
                if blocks == 1 {
                    block = 0usize;
                }
                let mut stored = query;
                if queries == 1 {
                    stored = 0usize;
                }
                let at = ((row * blocks + block) * queries + stored) * 2 + first_key / 32 % 2;
                word & (plan.bits[at] >> (first_key % 32) as u32)
            }
            ComptimeOption::None => word,
        }
    }

    /// The first and one past the last query that sees some key of a tile under the causal mask; equal if there is
    /// none.
    pub(crate) fn queries(
        &self,
        keys: &TileRows,
        sizes: &Sizes,
        #[comptime] bp: Blueprint,
    ) -> (usize, usize) {
        let mut first = 0usize;
        if comptime!(bp.causal) {
            let shift = query_shift(sizes.q_len, sizes.k_len);
            first = max(keys.first as i32 + shift, 0i32) as usize;
            // Tiles that begin where counts begin read the fewest.
            if comptime!(bp.pattern.is_planned()) {
                first -= first % PLAN_QUERIES;
            }
        }
        (min(first, sizes.q_len), sizes.q_len)
    }

    /// True if the query of the pair attends to its key.
    pub(crate) fn selected(&self, outer: usize, inner: usize) -> bool {
        let (query, key) = query_and_key(outer, inner, self.keys_outer);
        (self.words[query] >> key as u32) & 1u32 == 1u32
    }

    /// The logit of a selected pair with its bias.
    pub(crate) fn biased(&self, logit: f32, outer: usize, inner: usize) -> f32 {
        let (query, key) = query_and_key(outer, inner, self.keys_outer);
        #[comptime]
        match &self.bias {
            ComptimeOption::Some(bias) => logit + bias.read(query, key),
            ComptimeOption::None => logit,
        }
    }
}

/// A bias per pair, and its elements for a tile: pair `(query, key)` of the tile reads the element
/// `origin + query * query_step + key * key_step`. Steps of 0 broadcast.
#[derive(CubeType)]
pub(crate) struct PairBias<'a> {
    bias: &'a Tensor<f32>,
    origin: usize,
    query_step: usize,
    key_step: usize,
}

#[cube]
impl<'a> PairBias<'a> {
    fn of(bias: &'a PairBiasArg) -> ComptimeOption<PairBias<'a>> {
        #[comptime]
        match bias {
            ComptimeOption::Some(bias) => {
                let mut query_step = 0usize;
                let mut key_step = 0usize;
                if bias.shape(2) > 1 {
                    query_step = bias.stride(2);
                }
                if bias.shape(3) > 1 {
                    key_step = bias.stride(3);
                }
                ComptimeOption::new_Some(PairBias::<'a> {
                    bias,
                    origin: 0usize,
                    query_step,
                    key_step,
                })
            }
            ComptimeOption::None => ComptimeOption::new_None(),
        }
    }

    fn place(&mut self, queries: &TileRows, keys: &TileRows, sizes: &Sizes) {
        let head = queries.head / (sizes.q_heads / self.bias.shape(1));
        let mut origin = head * self.bias.stride(1);
        if self.bias.shape(0) > 1 {
            origin += queries.batch * self.bias.stride(0);
        }
        self.origin = origin + queries.first * self.query_step + keys.first * self.key_step;
    }

    /// The bias of a selected pair, which is thus within the lengths.
    fn read(&self, query: usize, key: usize) -> f32 {
        self.bias[self.origin + query * self.query_step + key * self.key_step]
    }
}
