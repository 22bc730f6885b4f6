//! Positions of queries: the last query has the position of the last key.

use cubecl::prelude::*;
use flash_dma_problem::PlanGeometry;

/// The number added to a query's index to get its position, with causal masking.
#[cube]
pub(crate) fn query_shift(q_len: usize, k_len: usize) -> i32 {
    q_len as i32 - k_len as i32
}

/// The last key that query `query` may see; negative if it sees none.
#[cube]
pub(crate) fn last_key(query: usize, q_len: usize, k_len: usize, #[comptime] causal: bool) -> i32 {
    let mut last = k_len as i32 - 1;
    if comptime!(causal) {
        last += query as i32 + 1 - q_len as i32;
    }
    last
}

/// One past [`last_key`].
#[cube]
pub(crate) fn end_key(query: usize, q_len: usize, k_len: usize, #[comptime] causal: bool) -> i32 {
    last_key(query, q_len, k_len, causal) + 1
}

/// The position of query `query`: the index of the last key it may see; -1 past the last query.
#[cube]
pub(crate) fn position(query: usize, q_len: usize, k_len: usize, #[comptime] causal: bool) -> i32 {
    let mut at = i32::new(-1);
    if query < q_len {
        at = last_key(query, q_len, k_len, causal);
    }
    at
}

/// The number added to a query's index to get its position, with causal masking.
pub(crate) fn position_shift(geometry: &PlanGeometry) -> i32 {
    // Both are at most i32::MAX.
    (geometry.k_len as i64 - geometry.q_len as i64) as i32
}
