//! Burn's multi-head attention on this crate's kernels: replace `use burn::nn::attention::…` by `use
//! burn_flash_dma::nn::mha::…`, and a model keeps its code, configuration files and records.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_flash_dma::nn::mha::{MhaInput, MultiHeadAttentionConfig};
//!
//! let device = Device::flex();
//! let layer = MultiHeadAttentionConfig::new(32, 4).init(&device);
//! let x = Tensor::<3>::random([2, 20, 32], Distribution::Default, &device);
//! let output = layer.forward(MhaInput::self_attn(x).causal());
//! assert_eq!(output.context.dims(), [2, 20, 32]);
//! assert_eq!(output.weights().dims(), [2, 4, 20, 20]);
//! # }
//! ```
//!
//! Types have the names, fields, methods and parameters of Burn's. Differences:
//!
//! | | Burn's | here |
//! |---|---|---|
//! | memory | three tensors of `len²` per head and more for gradients | O(len), and a bit per pair of a mask |
//! | [`MhaOutput::weights`] | a field | a method, which computes them when called |
//! | a query from which every key is hidden | the mean of all values | zeros, before the last projection |
//! | a hidden key that is NaN or ∞ | reaches the output | does not |
//! | `min_float` | replaces a hidden logit | read from files, and not used: a hidden key has weight 0 |
//! | causal masking | a mask of `len²` | the same, or [`MhaInput::causal`] without a mask |
//! | head dimension | any | a multiple of 8 up to 256; otherwise [`AttentionError::HeadDim`] |
//! | [`MhaCache`] | one new token per call | one or more; queries are not kept |
//! | dropout of the weights, in training | drawn by the device's generator | in the kernels; a seed of the device gives other masks than Burn's |
//!
//! [`AttentionError::HeadDim`]: crate::AttentionError::HeadDim

mod cache;
mod input;
mod module;
mod output;

pub use cache::MhaCache;
pub use input::MhaInput;
pub use module::{MultiHeadAttention, MultiHeadAttentionConfig};
pub use output::MhaOutput;
