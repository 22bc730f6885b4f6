//! Decoding: caches that keep the keys, and attention of a few new tokens over them.
//!
//! As scores do not depend on the query and a key's rank only gets worse, an evicted key never returns: a cache of the
//! `window` best keys of each kv head, its **slots**, is exact for a context of any length; recent keys and sinks have
//! slots among these. A cache of **pages** keeps every key, for dense attention.
//!
//! A step of up to 16 tokens is:
//!
//! 1. `place` (slots): the slot that each token takes, in order of the tokens;
//! 2. attention, keys split over cubes: over the cache *as it was* and the new tokens, each key on the interval of the
//!    step's queries that the moves leave it, so that query `t` sees what it would if the tokens came one at a time;
//! 3. `finish`: the parts of the keys merged, and the new rows written into the cache.
//!
//! More tokens at once (a prefill) are appended by `choose`, a radix selection among slots and tokens. Both order keys
//! by their worth to the last token.

pub(crate) mod append;
pub(crate) mod args;
pub(crate) mod choose;
pub(crate) mod chunk;
pub(crate) mod commit;
pub(crate) mod finish;
pub(crate) mod kernel;
pub(crate) mod keys;
pub(crate) mod launch;
pub(crate) mod merge;
pub(crate) mod mma;
pub(crate) mod parts;
pub(crate) mod place;
pub(crate) mod tensors;
#[cfg(test)]
mod tests;

pub use launch::{plan, plan_on};
