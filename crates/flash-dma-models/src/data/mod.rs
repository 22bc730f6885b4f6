//! From text to batches: token files, documents packed into rows, a resumable order.
//!
//! | step | by |
//! |---|---|
//! | text to ids | [`Vocabulary`]: bytes, or a `tokenizer.json` |
//! | plain text or JSONL to a token file | [`write_tokens`]; [`TokenFileWriter`] for documents of your own |
//! | the file, mapped into memory | [`TokenFile`] |
//! | documents into rows of one length, a dataset of Burn's | [`PackedRows`] |
//! | batches of rows in Burn's data loaders | [`RowBatcher`] |
//! | shuffled batches, resumed in the middle of an epoch | [`Loader`], [`LoaderState`] |
//! | metrics of Burn's training loop (feature `train`) | `TokensPerSecond`, `DeviceMemory` |
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::data::dataloader::DataLoader;
//! use burn::tensor::Device;
//! use flash_dma_models::data::{Loader, PackedRows, TextFormat, Vocabulary, write_tokens};
//! use std::sync::Arc;
//!
//! let dir = std::env::temp_dir().join("flash-dma-data-example");
//! std::fs::create_dir_all(&dir).unwrap();
//! let (text, tokens) = (dir.join("text"), dir.join("tokens"));
//! std::fs::write(&text, "One document.\n\nAnother one,\nof two lines.\n").unwrap();
//!
//! // Documents end at empty lines and with the byte 0, so that a model learns to stop.
//! let vocabulary = Vocabulary::bytes().with_end(0).unwrap();
//! let format = TextFormat::Separated(String::new());
//! let file = write_tokens(&tokens, [&text], &format, &vocabulary).unwrap().file;
//!
//! // A row of 16 tokens a step, in the order of the seed 7.
//! let rows = PackedRows::new(Arc::new(file), 16).unwrap();
//! let loader = Loader::new(rows, 1, 7, &Device::flex()).unwrap();
//! let batch = loader.iter().next().unwrap().unwrap();
//! assert_eq!(batch.inputs.dims(), [1, 16]);
//! # }
//! ```

mod batch;
mod corpus;
mod error;
mod file;
mod input;
mod loader;
#[cfg(feature = "train")]
mod metric;
mod rows;
mod state;
mod vocabulary;

pub use batch::{Batch, RowBatcher};
pub use corpus::{Written, write_tokens};
pub use error::{DataError, LineFault};
pub use file::{TokenFile, TokenFileWriter};
pub use input::TextFormat;
pub use loader::Loader;
#[cfg(feature = "train")]
pub use metric::{DeviceMemory, TokenCount, TokensPerSecond};
pub use rows::{PackedRows, Row};
pub use state::LoaderState;
pub use vocabulary::{TextStream, Vocabulary};
