//! Language models with dynamic-mask attention for Burn.
//!
//! - [`nn`]: a decoder-only model, its blocks and what they are made of;
//! - [`Curriculum`]: texts that are short when a training begins;
//! - [`doge`]: the Doge family, read from and written to Hugging Face's files;
//! - [`generate`]: samplers, batches of prompts, beams, speculative decoding;
//! - `data` (feature `data`): text to token files, packing, batches.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod curriculum;
#[cfg(feature = "data")]
pub mod data;
pub mod decoder;
pub mod doge;
pub mod generate;
pub mod nn;

pub use curriculum::Curriculum;
pub use decoder::Decoder;
