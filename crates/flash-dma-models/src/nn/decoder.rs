//! A decoder-only language model with dynamic-mask attention.

use super::block::{DecoderBlock, DecoderBlockConfig};
use super::expect;
use super::feed_forward::FeedForwardConfig;
use super::input::TokenInput;
use super::normalised;
use super::stack::{Stack, whole_model};
use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{Embedding, EmbeddingConfig, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, ScoreLearning, Scores, Selection};
use burn_flash_dma::{AttentionError, Intervals};
use serde::{Deserialize, Serialize};

const EPSILON: f64 = 1e-5;

/// Minimum window of a layer that selects its keys, in short texts.
const LEAST_WINDOW: usize = 8;

/// Which activations of the blocks are kept for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// All that it reads.
    #[default]
    Kept,
    /// Inputs and selections of the blocks; the rest is recomputed.
    Recomputed,
}

/// Configuration of a [`Decoder`]: blocks whose attention selects its keys and, optionally, local and dense ones.
/// Layers are counted from 1.
#[derive(Config, Debug)]
pub struct DecoderConfig {
    /// Configuration of the layers that select their keys, and sizes of all layers.
    pub attention: DynamicMaskAttentionConfig,
    /// Number of blocks.
    pub layers: usize,
    /// Number of tokens in the vocabulary. Default: 256, for bytes.
    #[config(default = 256)]
    pub vocabulary: usize,
    /// Window of the odd layers, which then are local: a query sees this many last keys. Only these layers use the
    /// rotary encoding of [`attention`](Self::attention), so nothing in the others depends on the length. With `None`
    /// no layer is local, and all use it. Default: 256.
    #[config(default = "Some(256)")]
    pub local_window: Option<usize>,
    /// Layers (counted from 1) that attend to all keys; local ones stay local. Default: none.
    #[config(default = "Vec::new()")]
    pub dense_layers: Vec<usize>,
    /// Element type of the activations. Parameters and optimiser state stay f32.
    #[config(default = "FloatDType::F32")]
    pub dtype: FloatDType,
    /// Which activations of the blocks are kept for the backward pass.
    #[config(default = "Activations::Kept")]
    pub activations: Activations,
}

/// A decoder-only language model: tokens in, logits of the next token out.
///
/// ```text
/// tokens [B, N] ── embedding ── block × layers ── RMSNorm ── · embeddingᵀ ── logits [B, N, V]
///
/// block:  x ── RMSNorm ── DynamicMaskAttention ── + ── RMSNorm ── SwiGLU ── linear ── + ── x'
///         └───────────────────────────────────────┘ └───────────────────────────────┘
/// ```
///
/// In layers that select, a query attends only to the earlier keys that learned scores rank highest. They need not be
/// near: the window is a budget, not a distance.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Selection};
/// use flash_dma_models::nn::DecoderConfig;
///
/// let device = Device::flex();
/// let attention = DynamicMaskAttentionConfig::new(32, 4)
///     .with_selection(Selection::keep(8))
///     .with_rope(Some(Rope::new(64)));
/// // The first layer sees the last 4 keys, the second one keeps any 8.
/// let model = DecoderConfig::new(attention, 2).with_local_window(Some(4)).init(&device);
/// let bytes = Tensor::<1, Int>::arange(0..20, &device).reshape([1, 20]);
/// assert_eq!(model.forward(bytes).dims(), [1, 20, 256]);
/// # }
/// ```
///
/// To [generate](crate::generate), convert it [for generation](Self::for_generation).
#[derive(Module, Debug)]
pub struct Decoder {
    /// `[vocabulary, d_model]`; its transpose makes the logits.
    pub embedding: Embedding,
    /// Blocks, in order.
    pub blocks: Vec<DecoderBlock>,
    /// Norm before the logits.
    pub norm: RmsNorm,
    #[module(skip)]
    pub(super) config: DecoderConfig,
}

impl DecoderConfig {
    /// Creates a model with random parameters on a device.
    ///
    /// # Panics
    ///
    /// If [`try_init`](Self::try_init) returns an error, with that error's text.
    #[must_use]
    pub fn init(&self, device: &Device) -> Decoder {
        expect(self.try_init(device))
    }

    /// Like [`init`](Self::init), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`DynamicMaskAttentionConfig::try_init`].
    pub fn try_init(&self, device: &Device) -> Result<Decoder, AttentionError> {
        let d_model = self.attention.d_model;
        // Small enough that the first logits are nearly uniform: after the norm, which gives unit mean square, a
        // logit's deviation is the embedding's times sqrt(d_model).
        let initializer = Initializer::Normal {
            mean: 0.0,
            std: 0.5 / (d_model as f64).sqrt(),
        };
        let blocks = (1..=self.layers).map(|number| self.block(number).try_init(device));
        let mut blocks = blocks.collect::<Result<Vec<_>, _>>()?;
        share_rotary_tables(&mut blocks);
        Ok(Decoder {
            embedding: EmbeddingConfig::new(self.vocabulary, d_model)
                .with_initializer(initializer)
                .init(device),
            blocks,
            norm: RmsNormConfig::new(d_model)
                .with_epsilon(EPSILON)
                .init(device),
            config: self.clone(),
        })
    }

    /// Configuration of block `number`.
    #[must_use]
    pub fn block(&self, number: usize) -> DecoderBlockConfig {
        // SwiGLU has three matrices instead of two: a hidden width of 8/3 instead of 4 keeps the number of
        // parameters. A multiple of 32 suits the matrix units.
        let hidden = (self.attention.d_model * 8 / 3).next_multiple_of(32);
        let feed_forward = FeedForwardConfig::new(hidden)
            .with_initializer(Some(LinearConfig::new(1, 1).initializer));
        DecoderBlockConfig::new(self.layer(number), feed_forward).with_norm_epsilon(EPSILON)
    }

    fn is_local(&self, number: usize) -> bool {
        self.local_window.is_some() && number % 2 == 1
    }

    fn layer(&self, number: usize) -> DynamicMaskAttentionConfig {
        let (mut layer, index) = match self.local_window {
            Some(_) if self.is_local(number) => {
                return last_keys(&self.attention, self.local_window);
            }
            Some(_) => (self.attention.clone().with_rope(None), number / 2 - 1),
            None => (self.attention.clone(), number - 1),
        };
        if self.dense_layers.contains(&number) {
            return last_keys(&layer, None);
        }
        // Tokens that one layer deals to the same head are spread over several by the next.
        layer.selection.turns = layer.selection.turns.map(|run| run << index.min(14));
        layer
    }
}

/// Gives all layers the table of rotary angles of the first that has one: theirs are the same, and those of a million positions
/// take a gigabyte.
fn share_rotary_tables(blocks: &mut [DecoderBlock]) {
    let layers = || blocks.iter().map(|block| &block.attention);
    let Some(table) = layers().find_map(|layer| layer.rope.clone()) else {
        return;
    };
    let rotary = blocks.iter_mut().map(|block| &mut block.attention.rope);
    rotary.flatten().for_each(|own| *own = table.clone());
}

/// A layer that keeps the last `window` keys, or all, with the parameters of a layer with linear scores. Its scores
/// have nothing to rank, and do not learn.
#[must_use]
pub fn last_keys(
    layer: &DynamicMaskAttentionConfig,
    window: Option<usize>,
) -> DynamicMaskAttentionConfig {
    (layer.clone())
        .with_scores(Scores::Ranking)
        .with_selection(window.map_or_else(Selection::new, Selection::last))
        .with_learning(Some(ScoreLearning::none()))
}

impl Decoder {
    pub(super) fn stack(&self) -> Stack<'_> {
        Stack {
            embedding: &self.embedding,
            blocks: &self.blocks,
            norm: &self.norm,
            unembedding: None,
            dtype: self.config.dtype,
        }
    }

    /// Configuration of the model.
    #[must_use]
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Shrinks the windows of layers that select their keys for texts `divisor` times shorter than configured: to the
    /// same share of the keys, at least 8, and at least twice the number always kept.
    ///
    /// # Errors
    ///
    /// See [`try_set_keep_window`](burn_flash_dma::nn::DynamicMaskAttention::try_set_keep_window).
    pub fn try_set_share(&mut self, divisor: usize) -> Result<(), AttentionError> {
        let selection = &self.config.attention.selection;
        let Some(window) = selection.window else {
            return Ok(());
        };
        let whatever = selection.recent.unwrap_or_default() + selection.sinks;
        let least = LEAST_WINDOW.max(2 * whatever);
        let window = (window / divisor).max(least).min(window);
        for (number, block) in (1..).zip(&mut self.blocks) {
            if !self.config.is_local(number) && !self.config.dense_layers.contains(&number) {
                block.attention.try_set_keep_window(window)?;
            }
        }
        Ok(())
    }

    /// Each layer's selection, with the scores `[batch, kv_heads, len]` that ranked the keys; `None` for a layer that
    /// attends to all keys.
    ///
    /// # Errors
    ///
    /// See [`try_forward`](Self::try_forward).
    pub fn try_selections(
        &self,
        input: impl Into<TokenInput>,
    ) -> Result<Vec<Option<(Intervals, Tensor<3>)>>, AttentionError> {
        let mut seen = Vec::with_capacity(self.blocks.len());
        self.stack().logits(input.into(), |block, x, sequences| {
            let (layer, norm) = (&block.attention, &block.attention_norm);
            seen.push(match layer.options().keep_window {
                None => None,
                Some(_) => {
                    let input = sequences.input(normalised(norm, x.clone())?);
                    let intervals = layer.try_selection(input.clone())?;
                    Some((intervals, layer.try_scores(input)?))
                }
            });
            Ok(())
        })?;
        Ok(seen)
    }

    /// The model for generation: without autodiff, and with its parameters in the type of the activations, to which
    /// every product rounds them otherwise.
    #[must_use]
    pub fn for_generation(&self) -> Self {
        super::cast(&self.valid(), self.config.dtype)
    }
}

whole_model!(Decoder {
    fn vocabulary(&self) -> usize {
        self.config.vocabulary
    }

    /// Up to the end of the rotary tables.
    fn replays_up_to(&self) -> usize {
        (self.config.attention.rope.as_ref()).map_or(0, |rope| rope.positions)
    }
});
