//! The backward pass on tensor cores: `mma.sync` of sm_80 and newer.
//!
//! Two large kernels, both recomputing the probabilities from the LSE with the forward pass's logits:
//! [`dq`] owns query tiles and streams the keys of their lists; [`dkdv`] owns key tiles within chunks of
//! queries ([`chunks`]) and streams the queries. Neither needs atomics for dq.

mod bias;
mod blueprint;
mod chunks;
mod delta;
mod dkdv;
mod dq;
mod dq_tile;
mod finite;
mod gather;
mod key_sums;
mod keys;
mod launch;
mod mask;
mod masked;
mod output;
mod pass;
mod queries;
mod repair;
mod roles;
mod seen;
mod sums;
mod weights;
mod workspace;

pub(crate) use bias::{BiasBlueprint, BiasGradient};
pub(crate) use blueprint::{DkdvBlueprint, MmaBlueprints};
pub(super) use keys::{OwnKey, own_key, query_range, score_row};
pub(crate) use launch::launch;
pub(crate) use mask::{HEAD_BITS, HEADER};
pub(super) use mask::{KeyMask, StepList};
pub(crate) use masked::{MaskLists, launch_masked};
pub(crate) use pass::row_sums_bytes;
pub(super) use queries::{Cursor, QueryRows, Range, Step};
pub(super) use repair::repair_key;
pub(super) use seen::{SeenWords, seen_pair};
pub(super) use sums::add_to;
