//! The backward pass: row sums, then dq (query-outer) and dk, dv, dscores (key-outer), each recomputing
//! the probabilities from the LSE.
//!
//! On tensor cores [`dq`] owns query tiles and streams the keys of their lists; [`dkdv`] owns key tiles within chunks
//! of queries and streams the queries. Neither needs atomics for dq.

pub(crate) mod bias;
pub(crate) mod blueprint;
pub(crate) mod delta;
pub(crate) mod dkdv;
pub(crate) mod dq;
pub(crate) mod launch;
pub(crate) mod masked;
pub(crate) mod matrix;
pub(crate) mod repair;
#[cfg(test)]
mod tests;
pub(crate) mod workspace;
