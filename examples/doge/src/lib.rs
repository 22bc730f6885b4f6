//! Programs over a Doge in Hugging Face's files: `doge` writes texts, `fine-tune` trains adapters, `serve` answers over
//! HTTP.

pub mod error;
pub mod folder;
pub mod fresh;
pub mod loss;
pub mod options;
mod progress;
mod resume;
pub mod server;
pub mod train;
