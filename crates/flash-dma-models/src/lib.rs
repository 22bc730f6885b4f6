//! Language models with dynamic-mask attention for Burn.
//!
//! - [`nn`]: a decoder-only model, its blocks and their parts;
//! - `TextTraining` (feature `train`): one call from text to a trained model, on one device or several;
//! - [`Curriculum`]: a training that begins with short texts;
//! - [`doge`]: the Doge family, read from and written to Hugging Face's files;
//! - [`generate`]: samplers, batches of prompts, beams, speculative decoding, for any [`LanguageModel`];
//! - `data` (feature `data`): text to token files, packing, batches.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod curriculum;
#[cfg(feature = "data")]
pub mod data;
pub mod doge;
pub mod generate;
mod language_model;
pub mod nn;
#[cfg(feature = "train")]
mod training;

pub use curriculum::Curriculum;
pub use language_model::LanguageModel;
#[cfg(feature = "train")]
pub use training::{Evaluated, FolderError, Reading, RunFolder, TextTraining, TrainingError};
