//! The decoder block.

use super::feed_forward::{FeedForward, FeedForwardConfig};
use super::input::Sequences;
use super::{branch, normalised};
use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig};
#[cfg(feature = "autodiff")]
use burn_flash_dma::train::Selections;
use serde::{Deserialize, Serialize};

/// Scaling of the residual stream around a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Residual {
    /// Unscaled: `x + layer(norm(x))`.
    #[default]
    Plain,
    /// By a learned vector, initialised to ones: `r * x + layer(norm(x))`.
    Learned,
}

/// Configuration of a [`DecoderBlock`].
#[derive(Config, Debug)]
pub struct DecoderBlockConfig {
    /// The attention layer, which sets `d_model` and the initialiser of the block.
    pub attention: DynamicMaskAttentionConfig,
    /// The feed-forward network.
    pub feed_forward: FeedForwardConfig,
    /// Scaling of the residual stream around the two layers. Default: none.
    #[config(default = "Residual::Plain")]
    pub residual: Residual,
    /// Epsilon of the norms before the two layers. Default: 1e-6.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
}

/// One block of a decoder: `x = r * x + attention(norm(x))`, then `x = s * x + feed_forward(norm(x))`, where `r` and
/// `s` are ones or learned.
#[derive(Module, Debug)]
pub struct DecoderBlock {
    /// Norm before attention.
    pub attention_norm: RmsNorm,
    /// Attention.
    pub attention: DynamicMaskAttention,
    /// Scale of the residual stream around attention: `[d_model]`.
    pub attention_residual: Option<Param<Tensor<1>>>,
    /// Norm before the feed-forward network.
    pub feed_forward_norm: RmsNorm,
    /// The feed-forward network.
    pub feed_forward: FeedForward,
    /// Scale of the residual stream around the feed-forward network: `[d_model]`.
    pub feed_forward_residual: Option<Param<Tensor<1>>>,
}

impl DecoderBlockConfig {
    /// Creates the block on a device.
    ///
    /// # Errors
    ///
    /// Errors of [`DynamicMaskAttentionConfig::try_init`], or [`AttentionError::Epsilon`].
    pub fn try_init(&self, device: &Device) -> Result<DecoderBlock, AttentionError> {
        let epsilon = self.norm_epsilon as f32;
        if !(epsilon.is_finite() && epsilon > 0.0) {
            return Err(AttentionError::Epsilon { epsilon });
        }
        let attention = self.attention.try_init(device)?;
        let d_model = self.attention.d_model;
        let norm = || {
            RmsNormConfig::new(d_model)
                .with_epsilon(self.norm_epsilon)
                .init(device)
        };
        let residual = || match self.residual {
            Residual::Plain => None,
            Residual::Learned => Some(Initializer::Ones.init([d_model], device)),
        };
        let initializer = &self.attention.initializer;
        Ok(DecoderBlock {
            attention_norm: norm(),
            attention,
            attention_residual: residual(),
            feed_forward_norm: norm(),
            feed_forward: self.feed_forward.init(d_model, initializer, device),
            feed_forward_residual: residual(),
        })
    }
}

impl DecoderBlock {
    /// The block on `[batch, len, d_model]`, to the same shape.
    ///
    /// # Errors
    ///
    /// See [`DynamicMaskAttention::try_forward`].
    pub fn try_forward(
        &self,
        x: Tensor<3>,
        sequences: &Sequences,
    ) -> Result<Tensor<3>, AttentionError> {
        self.try_forward_with(x, |layer, x| layer.try_forward(sequences.input(x)))
    }

    /// [`try_forward`](Self::try_forward) for gradient checkpointing: makes the selection in the first pass and
    /// reuses it in the second, see [`Checkpointed`](burn_flash_dma::train::Checkpointed).
    ///
    /// # Errors
    ///
    /// See [`try_forward`](Self::try_forward).
    ///
    /// # Panics
    ///
    /// If the first pass had fewer blocks.
    #[cfg(feature = "autodiff")]
    pub fn try_forward_selecting(
        &self,
        x: Tensor<3>,
        sequences: &Sequences,
        selections: &mut Selections,
    ) -> Result<Tensor<3>, AttentionError> {
        self.try_forward_with(x, |layer, x| {
            selections.try_attend(layer, sequences.input(x))
        })
    }

    /// The block on new tokens of sequences whose earlier tokens are in the cache.
    ///
    /// # Errors
    ///
    /// See [`DynamicMaskAttention::try_forward_cached`].
    // ANCHOR: block
    pub fn try_forward_cached(
        &self,
        x: Tensor<3>,
        cache: &mut AttentionCache,
    ) -> Result<Tensor<3>, AttentionError> {
        self.try_forward_with(x, |layer, x| layer.try_forward_cached(x, cache))
    }

    /// The block with attention by `attend`, which gets the layer and its normalised input.
    ///
    /// # Errors
    ///
    /// Errors of `attend`.
    pub fn try_forward_with(
        &self,
        x: Tensor<3>,
        attend: impl FnOnce(&DynamicMaskAttention, Tensor<3>) -> Result<Tensor<3>, AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        let [x, normal] = branch(&self.attention_norm, x)?;
        let out = attend(&self.attention, normal)?;
        self.after_attention(x, out)
    }

    /// [`try_forward_with`](Self::try_forward_with), but the graphs in front of the attention and of the residual path share the
    /// input alone: each can have its backward pass by itself.
    #[cfg(feature = "autodiff")]
    pub(super) fn try_forward_apart(
        &self,
        x: Tensor<3>,
        attend: impl FnOnce(&DynamicMaskAttention, Tensor<3>) -> Result<Tensor<3>, AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        let normal = normalised(&self.attention_norm, x.clone())?;
        let out = attend(&self.attention, normal)?;
        self.after_attention(x, out)
    }

    /// The rest of the block, from its input and the attention's output.
    fn after_attention(&self, x: Tensor<3>, out: Tensor<3>) -> Result<Tensor<3>, AttentionError> {
        let x = scaled(&self.attention_residual, x) + out;
        let [x, normal] = branch(&self.feed_forward_norm, x)?;
        let out = self.feed_forward.try_forward(normal)?;
        Ok(scaled(&self.feed_forward_residual, x) + out)
    }
    // ANCHOR_END: block
}

fn scaled(residual: &Option<Param<Tensor<1>>>, x: Tensor<3>) -> Tensor<3> {
    match residual {
        None => x,
        Some(residual) => {
            let residual = residual.val().cast(x.dtype());
            x * residual.unsqueeze()
        }
    }
}
