//! The Doge family: decoders with the paper's dynamic-mask attention, learned residual vectors, and optionally a
//! mixture of experts.
//!
//! [`Doge`] computes what `transformers`' eager Doge computes, and reads and writes its files:
//!
//! ```no_run
//! use burn::tensor::Device;
//! use flash_dma_models::doge::Doge;
//!
//! # fn main() -> Result<(), flash_dma_models::doge::ModelError> {
//! # let device = Device::default();
//! // `config.json`, and `model.safetensors` or the shards of `model.safetensors.index.json`.
//! let model = Doge::from_safetensors("path/to/Doge-20M", &device)?;
//! model.save_safetensors("path/to/copy")?;
//! # Ok(())
//! # }
//! ```
//!
//! # Differences between the files and the module
//!
//! | | in the files | in the module |
//! |---|---|---|
//! | linear layers | `[out, in]` | `[in, out]` |
//! | rotary pairs | features `i` and `i + head_dim / 2` | neighbours: rows of the q and k projections and norms in another order |
//! | names | current or older ones (`word_embed`, `feed_forward`, ..); written as current ones | the fields of [`Doge`] |
//! | `A`, `dt_proj` | per key/value head, or in older files per query head | per key/value head |
//! | element type | f32, f16 or bf16 | the requested one |
//!
//! Files with scores per query head are read exactly. If the query heads of every group agree, their scores become
//! those of the key/value head; if not, each query head gets a key/value head of its own, a copy of the shared one,
//! and [`DogeConfig::kv_heads`] says so. Older files without q/k norms are read without these norms.
//!
//! # Differences from `transformers`
//!
//! - **Positions.** Dynamic RoPE equals plain RoPE up to `max_position_embeddings`. Beyond, `transformers` changes
//!   the frequencies with the length while cached keys keep theirs, so its result depends on how a text was divided.
//!   This model refuses such lengths ([`AttentionError::TooLarge`](burn_flash_dma::AttentionError)).
//! - **Experts.** With several tokens `transformers` mixes the router's logits of different tokens, see
//!   [`Routing`](crate::nn::Routing). The default routes each token by its own.
//! - **Ties.** Among equal scores the lower position is kept here; `torch.topk` leaves it open.

mod adapters;
mod config;
mod error;
mod files;
mod heads;
mod hugging_face;
mod model;
mod names;

pub use config::{DogeConfig, RopeScaling};
pub use error::ModelError;
pub use model::Doge;
