//! Independent parts of a training step (feature `autodiff`).
//!
//! | part | replaces | because |
//! |---|---|---|
//! | [`AdamWConfig`] | Burn's `AdamWConfig` | one pass over memory, and in 16 bits one rounding |
//! | [`optimize`] | `ModuleOptimizer::step` | clips by the norm of all gradients, and takes all parameters in a few launches |
//! | [`clip_gradients`] | Burn's clipping by norm | Burn's clips each parameter by its own norm |
//! | [`embed`] | `Embedding::forward` | in 16 bits its gradient rounds after every token, and one thread a column adds them |
//! | [`cross_entropy`] | `CrossEntropyLoss` | fewer launches, and only the logits are kept |
//! | [`linear_cross_entropy`] | an unembedding and `CrossEntropyLoss` | the logits of a large vocabulary are never whole |
//! | [`Checkpointed`] | a loop over blocks | only the blocks' inputs are kept, and the rest is recomputed |
//! | [`try_in_parts`] | a pass over a long sequence | memory holds one part of it at a time |
//! | [`DeviceGroup`] | a pass over a long sequence | each device has a part of it |
//! | `SelectionMetric` (feature `train`) | | selections, and gradients of scores |
//! | `data_parallel` (feature `train`) | | one of Burn's strategies for several devices |
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::module::{Module, Param};
//! use burn::nn::{Embedding, EmbeddingConfig};
//! use burn::optim::GradientsParams;
//! use burn::tensor::{Device, FloatDType, Int, Tensor};
//! use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig};
//! use burn_flash_dma::train::{AdamWConfig, cross_entropy, embed, optimize};
//!
//! #[derive(Module, Debug)]
//! struct Model {
//!     embedding: Embedding,
//!     attention: DynamicMaskAttention,
//! }
//!
//! let device = Device::flex().autodiff();
//! let mut model = Model {
//!     embedding: EmbeddingConfig::new(256, 32).init(&device),
//!     attention: DynamicMaskAttentionConfig::new(32, 4).init(&device),
//! };
//! let mut optimiser = AdamWConfig::new().init();
//!
//! let tokens = Tensor::<1, Int>::arange(0..20, &device).reshape([2, 10]);
//! let x = model.attention.forward(embed(&model.embedding, tokens.clone(), FloatDType::F32));
//! let logits = x.matmul(model.embedding.weight.val().transpose().unsqueeze());
//! let loss = cross_entropy(logits.flatten(0, 1), tokens.flatten(0, 1));
//! let gradients = GradientsParams::from_grads(loss.backward(), &model);
//! // Clipped to a norm of 1. The norm stays on the device, as the loss does.
//! let norm: Tensor<1>;
//! (model, norm) = optimize(&mut optimiser, 1e-3, model, gradients, 1.0);
//! # }
//! ```

mod adamw;
mod carry_gradient;
mod checkpointing;
mod clipping;
mod device_group;
mod embedding;
mod in_parts;
mod loss;
#[cfg(feature = "train")]
mod metric;
mod neighbours;
#[cfg(feature = "train")]
mod parallel;
mod part_layers;
mod parts;
mod transfer;

pub use adamw::{AdamW, AdamWConfig, optimize};
pub use checkpointing::{Checkpointed, Selections, add_gradients};
pub use clipping::clip_gradients;
pub use device_group::{DeviceGroup, StepInParts};
pub use embedding::embed;
pub use in_parts::try_in_parts;
pub use loss::{Unembedding, cross_entropy, linear_cross_entropy, sum_losses, token_losses};
#[cfg(feature = "train")]
pub use metric::{Measure, SelectionInput, SelectionMetric};
#[cfg(feature = "train")]
pub use parallel::data_parallel;
pub use part_layers::PartLayers;
pub use parts::Parts;
pub use transfer::send;
