//! Text to batches: tokens in files, documents packed into rows, an order that can be taken up again.
//!
//! | step | by |
//! |---|---|
//! | text to ids | [`Vocabulary`]: bytes, or a `tokenizer.json` |
//! | plain text or JSONL to a token file | [`write_tokens`]; [`TokenFileWriter`] for documents of your own |
//! | the file, mapped into memory | [`TokenFile`] |
//! | documents into rows of one length | [`PackedRows`] |
//! | shuffled batches, resumed in the middle of an epoch | [`Loader`], [`LoaderState`] |
//! | all that in Burn's training loop (feature `train`) | `EpochLoader`, `TokensPerSecond`, `DeviceMemory` |
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::Device;
//! use flash_dma_models::data::{Batching, Loader, PackedRows, TextFormat, Vocabulary, write_tokens};
//! use std::sync::Arc;
//!
//! let dir = std::env::temp_dir().join("flash-dma-data-example");
//! std::fs::create_dir_all(&dir).unwrap();
//! let (text, tokens) = (dir.join("text"), dir.join("tokens"));
//! std::fs::write(&text, "One document.\n\nAnother one,\nof two lines.\n").unwrap();
//!
//! // Documents end where a line is empty, and with the byte 0, so that a model learns to stop.
//! let vocabulary = Vocabulary::bytes().with_end(0).unwrap();
//! let format = TextFormat::Separated(String::new());
//! let file = write_tokens(&tokens, [&text], &format, &vocabulary).unwrap().file;
//!
//! // Two rows of 16 tokens a step.
//! let rows = PackedRows::new(Arc::new(file), 16).unwrap();
//! let mut loader = Loader::new(rows, Batching::new(2).shuffled(1), &Device::flex()).unwrap();
//! let batch = loader.next().unwrap().unwrap();
//! assert_eq!(batch.inputs.dims(), [2, 16]);
//! # drop((loader, batch));
//! # std::fs::remove_dir_all(&dir).unwrap();
//! # }
//! ```
//!
//! The format of a token file stands in [`mod@file`].

mod batch;
mod corpus;
mod error;
pub mod file;
mod input;
mod loader;
#[cfg(feature = "train")]
mod metric;
mod permutation;
mod rows;
#[cfg(feature = "train")]
mod training;
mod vocabulary;

pub use batch::Batch;
pub use corpus::{Written, write_tokens};
pub use error::{DataError, LineFault};
pub use file::{TokenFile, TokenFileWriter};
pub use input::TextFormat;
pub use loader::{Batching, Loader, LoaderState, Order, Remainder};
#[cfg(feature = "train")]
pub use metric::{DeviceMemory, TokenCount, TokensPerSecond};
pub use rows::{PackedRows, Row};
#[cfg(feature = "train")]
pub use training::EpochLoader;
pub use vocabulary::{TextStream, Vocabulary};
