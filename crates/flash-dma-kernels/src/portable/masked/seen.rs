//! The visible keys of a row, as bits, and sums over them.

use crate::pattern::position::prefix;
use crate::portable::blueprint::Blueprint;
use crate::portable::visibility::{Pairs, PairsExpand};
use cubecl::prelude::*;

/// The keys from `first` on that a query sees, one bit each, up to the next multiple of 32; 0 past the last query.
/// `row` is the row of the plan's batches and heads; `bits` are read if the pattern is planned.
#[cube]
pub(crate) fn seen_keys(
    bits: &Tensor<u32>,
    row: usize,
    query: usize,
    first: usize,
    q_len: usize,
    k_len: usize,
    #[comptime] bp: Blueprint,
) -> u32 {
    let mut seen = 0u32;
    if query < q_len {
        seen = prefix(first, query, q_len, k_len, bp.causal);
        if comptime!(bp.pattern.is_planned()) {
            let (blocks, queries) = (bits.shape(2), bits.shape(3));
            let mut block = first / 64;
            if blocks == 1 {
                block = 0usize;
            }
            let mut stored = query;
            if queries == 1 {
                stored = 0usize;
            }
            let at = ((row * blocks + block) * queries + stored) * 2 + first / 32 % 2;
            seen &= bits[at] >> (first % 32) as u32;
        }
    }
    seen
}

/// Whether some of the queries `first_query..end_query` see something of the block of the key `first_key`.
#[cube]
pub(crate) fn is_active(
    counts: &Tensor<u32>,
    row: usize,
    first_query: usize,
    end_query: usize,
    first_key: usize,
    #[comptime] bp: Blueprint,
) -> bool {
    let mut sum = 1u32;
    if comptime!(bp.pattern.is_planned()) {
        sum = 0u32;
        let (query_blocks, key_blocks) = (counts.shape(2), counts.shape(3));
        for block in first_query / 16..end_query.div_ceil(16usize) {
            sum += counts[(row * query_blocks + block) * key_blocks + first_key / 64];
        }
    }
    sum > 0
}

/// The row of a mask or bias of `heads` heads and `batches` sequences that a query head reads.
#[cube]
pub(crate) fn broadcast_row(
    batches: usize,
    heads: usize,
    batch: usize,
    head: usize,
    q_heads: usize,
) -> usize {
    let mut row = head / (q_heads / heads);
    if batches > 1 {
        row += batch * heads;
    }
    row
}

/// Location of a bias row of a query head: element `base + query * query_step + key * key_step`. Strides of 0
/// broadcast.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BiasRow {
    pub base: usize,
    pub query_step: usize,
    pub key_step: usize,
}

#[cube]
impl BiasRow {
    /// Never read without a bias.
    pub(crate) fn new(
        bias: &Tensor<f32>,
        batch: usize,
        head: usize,
        q_heads: usize,
        #[comptime] bp: Blueprint,
    ) -> BiasRow {
        let mut row = BiasRow {
            base: 0usize,
            query_step: 0usize,
            key_step: 0usize,
        };
        if comptime!(bp.pattern.has_pair_bias()) {
            row.base = head / (q_heads / bias.shape(1)) * bias.stride(1);
            if bias.shape(0) > 1 {
                row.base += batch * bias.stride(0);
            }
            if bias.shape(2) > 1 {
                row.query_step = bias.stride(2);
            }
            if bias.shape(3) > 1 {
                row.key_step = bias.stride(3);
            }
        }
        row
    }

    /// The bias of a pair that is seen, so within the lengths.
    pub(crate) fn read(
        &self,
        bias: &Tensor<f32>,
        query: usize,
        key: usize,
        #[comptime] bp: Blueprint,
    ) -> f32 {
        let mut value = 0.0f32;
        if comptime!(bp.pattern.has_pair_bias()) {
            value = bias[self.base + query * self.query_step + key * self.key_step];
        }
        value
    }
}

/// The keys of a tile that each query of a tile sees, one word per query, in shared memory.
#[derive(CubeType)]
pub(crate) struct Seen {
    pub words: Shared<[u32]>,
    /// Whether the keys are the outer rows.
    #[cube(comptime)]
    keys_outer: bool,
}

#[cube]
impl Seen {
    /// Allocates room for the queries of a tile.
    pub(crate) fn new(#[comptime] queries: usize, #[comptime] keys_outer: bool) -> Seen {
        Seen {
            words: Shared::<[u32]>::new_slice(queries),
            keys_outer,
        }
    }
}

#[cube]
impl Pairs for Seen {
    fn selected(&self, outer: usize, inner: usize) -> bool {
        let (mut query, mut key) = (outer, inner);
        if comptime!(self.keys_outer) {
            query = inner;
            key = outer;
        }
        (self.words[query] >> key as u32) & 1u32 == 1u32
    }
}
