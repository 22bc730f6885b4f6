//! Code that both engines share: a key tile's keys and mask, its query stream, and the sums over chunks of queries.

pub(crate) mod alibi;
pub(crate) mod args;
pub(crate) mod chunk_tile;
pub(crate) mod dropout;
pub(crate) mod gather;
pub(crate) mod key_sums;
pub(crate) mod keys;
pub(crate) mod mask;
pub(crate) mod queries;
pub(crate) mod steps;
pub(crate) mod sums;
