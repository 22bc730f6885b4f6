//! The code shared by both tensor-core engines: copies, fragments, query tiles, key streams, logits and repairs.
//!
//! [`mma`] and [`wgmma`] hold the differences: products, and for `wgmma` the ring of stages and the boxes of the TMA.

pub(crate) mod args;
pub(crate) mod attended;
pub(crate) mod blueprint;
pub(crate) mod dropout;
pub(crate) mod fragment;
pub(crate) mod key_stream;
pub(crate) mod logit_scale;
pub(crate) mod logits;
pub(crate) mod mask;
pub(crate) mod mma;
pub(crate) mod pair_bias;
pub(crate) mod ptx;
pub(crate) mod query_tile;
pub(crate) mod repair;
pub(crate) mod rows;
pub(crate) mod softmax;
pub(crate) mod stages;
pub(crate) mod tile_keys;
pub(crate) mod wgmma;
