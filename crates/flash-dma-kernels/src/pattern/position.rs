//! Positions of queries: the ends of queries and keys are aligned, so that the last query has the position of the last
//! key.

use cubecl::prelude::*;

/// The keys `first..first + 32` that causal masking and the end of the keys leave to a query, one bit each.
#[cube]
pub(crate) fn prefix(
    first: usize,
    query: usize,
    q_len: usize,
    k_len: usize,
    #[comptime] causal: bool,
) -> u32 {
    let mut end = k_len as i32;
    if comptime!(causal) {
        end = query as i32 + 1 + k_len as i32 - q_len as i32;
    }
    let count = end - first as i32;
    let mut bits = 0u32;
    if count >= 32 {
        bits = u32::new(comptime!(u32::MAX as i64));
    } else if count > 0 {
        bits = (1u32 << count as u32) - 1u32;
    }
    bits
}

/// The position of query `query`: the index of the last key it may see; -1 past the last query.
#[cube]
pub(crate) fn position(query: usize, q_len: usize, k_len: usize, #[comptime] causal: bool) -> i32 {
    let mut at = i32::new(-1);
    if query < q_len {
        at = k_len as i32 - 1;
        if comptime!(causal) {
            at += query as i32 + 1 - q_len as i32;
        }
    }
    at
}
