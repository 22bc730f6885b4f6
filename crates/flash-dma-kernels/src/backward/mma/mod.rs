//! The backward pass on tensor cores: `mma.sync` of sm_80 and newer.
//!
//! Two large kernels, both recomputing the probabilities from the LSE with the forward pass's logits:
//! [`dq`] owns query tiles and streams the keys of their lists; [`dkdv`] owns key tiles within chunks of
//! queries ([`chunks`]) and streams the queries. Neither needs atomics for dq.

mod blueprint;
mod chunks;
mod delta;
mod dkdv;
mod dq;
mod dq_tile;
mod finite;
mod gather;
mod keys;
mod launch;
mod queries;
mod repair;
mod roles;
mod sums;
mod weights;

pub(super) use blueprint::DkdvBlueprint;
pub(crate) use blueprint::MmaBlueprints;
pub(super) use keys::{OwnKey, own_key, query_range};
pub(crate) use launch::launch;
pub(super) use queries::{Cursor, QueryRows, Range, Step};
pub(super) use repair::repair_key;
pub(super) use sums::add_to;
