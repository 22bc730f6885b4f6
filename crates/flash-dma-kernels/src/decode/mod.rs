//! Decoding: caches that keep the keys, and attention of a few new tokens over them.
//!
//! As scores do not depend on the query and a key's rank only gets worse, an evicted key never returns: a
//! cache of the `window` best keys of each kv head, its **slots**, serves a context of any length exactly. A cache
//! of **pages** keeps every key, for dense attention.
//!
//! A step of up to 16 tokens is:
//!
//! 1. [`plan`] (slots): which slot each token takes, one token after the other;
//! 2. attention, keys split over cubes: over the cache *as it was* and the new tokens, each key on the interval
//!    of the step's queries that the plan leaves it, so that query `t` sees what it would if the tokens came one at a
//!    time;
//! 3. [`finish`]: the parts of the keys merged, and the new rows written into the cache.
//!
//! More tokens at once (a prefill) are appended by [`choose`], a radix selection of the `window` best of slots
//! and tokens.

mod append;
mod args;
mod choose;
mod chunk;
mod commit;
mod finish;
mod kernel;
mod keys;
mod launch;
mod merge;
mod mma;
mod parts;
mod plan;
#[cfg(test)]
mod tests;
mod workspace;

pub use append::{append, append_pages};
pub use args::{Cache, Pages, Slots, Tokens};
pub use chunk::chunk_keys;
pub use launch::{DecodeTuning, decode, decode_engine, decode_on, decode_pages, decode_tuned};
pub use workspace::{decode_workspace, decode_workspace_on};
