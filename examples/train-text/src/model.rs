//! A byte-level decoder-only transformer with dynamic-mask attention.
//!
//! ```text
//! bytes [B, N] ── embedding ── block × layers ── RMSNorm ── · embeddingᵀ ── logits [B, N, 256]
//!
//! block:  x ── RMSNorm ── DynamicMaskAttention ── + ── RMSNorm ── SwiGLU ── linear ── + ── x'
//!         └───────────────────────────────────────┘ └───────────────────────────────┘
//! ```
//!
//! Every query attends only to the `window` keys that the layer's learned scores rank highest among
//! the keys before it. Those keys need not be near: the window is a budget, not a distance.

use burn::module::{ModuleMapper, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig, SwiGlu,
    SwiGluConfig,
};
use burn::prelude::*;
use burn::tensor::activation::silu;
use burn::tensor::{FloatDType, Gradients};
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig};
use burn_flash_dma::train::SelectionInput;
use burn_flash_dma::{AttentionError, linear, product, rms_norm};

/// A byte has 256 values; there is no tokeniser.
pub const VOCABULARY: usize = 256;

/// Sizes of a [`TextModel`].
#[derive(Config, Debug)]
pub struct TextModelConfig {
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads; each is `d_model / heads` wide.
    pub heads: usize,
    /// Key and value heads, each shared by `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Longest sequence, which the rotary position encoding is made for.
    pub context: usize,
    /// Keys a query may attend to; `context` or more is dense attention.
    pub window: usize,
    /// Element type of the activations. The parameters and the optimiser's state stay f32.
    #[config(default = "FloatDType::F32")]
    pub dtype: FloatDType,
}

/// The language model: bytes in, logits of the next byte out.
#[derive(Module, Debug)]
pub struct TextModel {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    #[module(skip)]
    dtype: FloatDType,
}

/// One pre-norm block: attention, then a feed-forward network, each added to the residual stream.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: RmsNorm,
    attention: DynamicMaskAttention,
    feed_forward_norm: RmsNorm,
    feed_forward: SwiGlu,
    feed_forward_out: Linear,
}

impl TextModelConfig {
    /// A model with random parameters on `device`.
    pub fn init(&self, device: &Device) -> TextModel {
        // Small enough that the first logits are nearly uniform: the norm before them has unit
        // mean square, so a logit's deviation is that of the embedding times the root of d_model.
        let initializer = Initializer::Normal {
            mean: 0.0,
            std: 0.5 / (self.d_model as f64).sqrt(),
        };
        TextModel {
            embedding: EmbeddingConfig::new(VOCABULARY, self.d_model)
                .with_initializer(initializer)
                .init(device),
            blocks: (0..self.layers).map(|_| self.init_block(device)).collect(),
            norm: RmsNormConfig::new(self.d_model).init(device),
            dtype: self.dtype,
        }
    }

    fn init_block(&self, device: &Device) -> Block {
        // SwiGLU has three matrices where a plain network has two: 8/3 of the width instead of 4
        // keeps the parameters equal. A multiple of 32 suits the matrix units.
        let hidden = (self.d_model * 8 / 3).next_multiple_of(32);
        let attention = DynamicMaskAttentionConfig::new(self.d_model, self.heads)
            .with_n_kv_heads(Some(self.kv_heads))
            .with_keep_window(Some(self.window))
            .with_max_seq_len(Some(self.context));
        Block {
            attention_norm: RmsNormConfig::new(self.d_model).init(device),
            attention: attention.init(device),
            feed_forward_norm: RmsNormConfig::new(self.d_model).init(device),
            feed_forward: SwiGluConfig::new(self.d_model, hidden).init(device),
            feed_forward_out: LinearConfig::new(hidden, self.d_model)
                .with_bias(false)
                .init(device),
        }
    }
}

impl TextModel {
    /// Logits of the byte that follows each byte of `tokens`.
    ///
    /// # Shapes
    ///
    /// - `tokens`: `[batch, seq]`, values below 256, `seq` at most the context
    /// - output: `[batch, seq, 256]`, f32
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.forward_seen(tokens, |_, _| {})
    }

    /// As [`forward`](Self::forward), and `see` gets each attention layer with its input.
    fn forward_seen(
        &self,
        tokens: Tensor<2, Int>,
        see: impl FnMut(&DynamicMaskAttention, &Tensor<3>),
    ) -> Tensor<3> {
        if self.dtype == FloatDType::F32 {
            return self.forward_as_stored(tokens, see);
        }
        // A 16-bit copy of the parameters computes; its gradients arrive at the f32 originals
        // through the cast. An update of a 16-bit parameter would mostly be rounded away.
        let copy = self.clone().map(&mut CastTo(self.dtype));
        copy.forward_as_stored(tokens, see).cast(FloatDType::F32)
    }

    /// Mean cross-entropy of the targets, in nats a byte, of shape `[1]`.
    pub fn loss(&self, inputs: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        cross_entropy(self.forward(inputs), targets)
    }

    // ANCHOR: selections
    /// The loss, and what every layer selects, for the metrics.
    pub fn loss_and_selections(
        &self,
        inputs: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> (Tensor<1>, SelectionInput) {
        let mut selections = SelectionInput::new();
        let logits = self.forward_seen(inputs, |layer, x| {
            selections = std::mem::take(&mut selections).layer(layer, x.clone());
        });
        (cross_entropy(logits, targets), selections)
    }

    /// The gradients of all scores' parameters, for the metrics.
    pub fn score_gradients(&self, grads: &Gradients) -> SelectionInput {
        let layers = self.blocks.iter().map(|block| &block.attention);
        layers.fold(SelectionInput::new(), |input, layer| {
            input.gradients_of(layer.scorer(), grads)
        })
    }
    // ANCHOR_END: selections

    /// The model as it generates: without autodiff, its parameters in the type of the activations, which
    /// [`forward`](Self::forward) would cast at every call.
    pub fn for_generation(&self) -> Self {
        self.valid().map(&mut CastTo(self.dtype))
    }

    /// The device of the parameters.
    pub fn device(&self) -> Device {
        self.embedding.weight.val().device()
    }

    /// One empty cache a layer, for `batch` sequences.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the layers' attention cannot be cached.
    pub fn caches(&self, batch: usize) -> Result<Vec<AttentionCache>, AttentionError> {
        let cache = |block: &Block| block.attention.try_init_cache(batch);
        self.blocks.iter().map(cache).collect()
    }

    /// Logits of the byte that follows the last of `tokens`, which go on where the tokens before them, which the
    /// caches have been given, end.
    ///
    /// # Shapes
    ///
    /// - `tokens`: `[batch, seq]`, of any length
    /// - output: `[batch, 256]`, f32
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the caches are not those of [`caches`](Self::caches), or the model is not one
    /// [`for_generation`](Self::for_generation).
    // ANCHOR: forward_cached
    pub fn forward_cached(
        &self,
        tokens: Tensor<2, Int>,
        caches: &mut [AttentionCache],
    ) -> Result<Tensor<2>, AttentionError> {
        let [batch, seq] = tokens.dims();
        let mut x = self.embedding.forward(tokens);
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.forward_cached(x, cache)?;
        }
        let last = x.narrow(1, seq - 1, 1);
        let logits = self.unembed(last).reshape([batch, VOCABULARY]);
        Ok(logits.cast(FloatDType::F32))
    }
    // ANCHOR_END: forward_cached

    fn forward_as_stored(
        &self,
        tokens: Tensor<2, Int>,
        mut see: impl FnMut(&DynamicMaskAttention, &Tensor<3>),
    ) -> Tensor<3> {
        let mut x = self.embedding.forward(tokens);
        for block in &self.blocks {
            x = block.forward(x, &mut see);
        }
        self.unembed(x)
    }

    /// The embedding read backwards: a byte's logit is the product with its own vector.
    fn unembed(&self, x: Tensor<3>) -> Tensor<3> {
        let unembedding = self.embedding.weight.val().transpose();
        product(normalised(&self.norm, x), unembedding)
    }
}

impl Block {
    /// `[batch, seq, d_model]` to the same shape.
    fn forward(
        &self,
        x: Tensor<3>,
        see: &mut impl FnMut(&DynamicMaskAttention, &Tensor<3>),
    ) -> Tensor<3> {
        let normal = normalised(&self.attention_norm, x.clone());
        see(&self.attention, &normal);
        let x = x + self.attention.forward(normal);
        self.feed_forward(x)
    }

    /// As [`forward`](Self::forward), for tokens behind those that the cache has been given.
    // ANCHOR: block
    fn forward_cached(
        &self,
        x: Tensor<3>,
        cache: &mut AttentionCache,
    ) -> Result<Tensor<3>, AttentionError> {
        let normal = normalised(&self.attention_norm, x.clone());
        let x = x + self.attention.try_forward_cached(normal, cache)?;
        Ok(self.feed_forward(x))
    }
    // ANCHOR_END: block

    fn feed_forward(&self, x: Tensor<3>) -> Tensor<3> {
        let normal = normalised(&self.feed_forward_norm, x.clone());
        // SwiGLU, on the products of the attention layer: its weights' gradients are sums over all tokens.
        let gate = linear(&self.feed_forward.linear_inner, normal.clone());
        let hidden = silu(gate) * linear(&self.feed_forward.linear_outer, normal);
        x + linear(&self.feed_forward_out, hidden)
    }
}

/// The norm's own result, by one pass over memory instead of four; its weight's gradient by two short ones instead of a
/// sum over all tokens in each thread.
fn normalised(norm: &RmsNorm, x: Tensor<3>) -> Tensor<3> {
    rms_norm(x, norm.gamma.val(), norm.epsilon as f32)
}

/// The mean over all tokens.
fn cross_entropy(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    let logits = logits.flatten::<2>(0, 1);
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    loss.forward(logits, targets.flatten::<1>(0, 1))
}

/// Casts every float parameter, within the autodiff graph.
struct CastTo(FloatDType);

impl ModuleMapper for CastTo {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.cast(self.0))
    }
}
