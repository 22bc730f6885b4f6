//! Caches of keys and values for decoding.
//!
//! An evicted key never returns, so decoding under dynamic-mask attention needs only the `keep_window` keys of
//! greatest score of each key/value head, however long the context: [`DynamicMaskCache`] holds exactly these, in
//! memory allocated once. A [`PagedCache`] keeps every key, or those of a sliding window, and grows by whole pages,
//! which sequences with a common prefix share. [`AttentionCache`] is either, so a model can be written once.
//!
//! ```
//! # #[cfg(feature = "flex")] {
#![doc = include_str!("example.rs")]
//! # }
//! ```
//!
//! A step equals the last rows of attention over all tokens of the sequence, however they were divided into steps. A
//! guess can be taken back: after [`hold`](AttentionCache::hold) the tokens of a step stay outside the cache until
//! [`accept`](AttentionCache::accept) says how many of them to keep. Only functions named `_sync` wait for the
//! device.
//!
//! For inference only: a tensor that autodiff tracks is refused (use `model.valid()` or
//! [`Tensor::inner`](burn::tensor::Tensor::inner)).

mod block_table;
mod chunk;
mod config;
mod either;
mod hold;
mod memory;
mod paged;
mod pool;
mod record;
mod replay;
mod sequences;
mod share;
mod slots;
#[cfg(test)]
mod tests;
mod tokens;

pub use block_table::BlockTable;
pub use config::{DynamicMaskCacheConfig, PagedCacheConfig};
pub use either::AttentionCache;
pub use paged::PagedCache;
pub use record::{DynamicMaskCacheRecord, PagedCacheRecord};
pub use replay::try_overwrite;
pub use slots::DynamicMaskCache;
