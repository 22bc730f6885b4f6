//! Arbitrary masks: bits, counts of visible pairs per block, and the lists of the remaining keys or queries.
//!
//! [`plan`](plan::plan) packs a mask into bits and counts the visible pairs of its blocks;
//! [`plan_ranges`](plan::plan_ranges) does so from a range of keys per query, without a mask. The attention kernels
//! skip the blocks whose count is 0.

pub(crate) mod args;
pub(crate) mod gather;
pub(crate) mod listed;
pub(crate) mod pack;
pub(crate) mod pack_rows;
pub(crate) mod plan;
pub(crate) mod query_lists;
pub(crate) mod ranges;
pub(crate) mod sizes;
#[cfg(test)]
mod tests;
pub(crate) mod tile_lists;
