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
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig, SwiGlu,
    SwiGluConfig,
};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig};
use burn_flash_dma::train::{Checkpointed, SelectionInput, Selections, cross_entropy, embed};
use burn_flash_dma::{AttentionError, linear, product, rms_norm, swiglu};
use serde::{Deserialize, Serialize};

/// A byte has 256 values; there is no tokeniser.
pub const VOCABULARY: usize = 256;

/// What is kept of the blocks for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// All that it reads.
    #[default]
    Kept,
    /// Their inputs and selections; the rest is computed a second time.
    Recomputed,
}

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
    /// What is kept of the blocks for the backward pass.
    #[config(default = "Activations::Kept")]
    pub activations: Activations,
}

/// The language model: bytes in, logits of the next byte out.
#[derive(Module, Debug)]
pub struct TextModel {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    #[module(skip)]
    dtype: FloatDType,
    #[module(skip)]
    activations: Activations,
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
            activations: self.activations,
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
        self.logits(tokens, see).cast(FloatDType::F32)
    }

    /// The logits in the type of the activations.
    fn logits(
        &self,
        tokens: Tensor<2, Int>,
        mut see: impl FnMut(&DynamicMaskAttention, &Tensor<3>),
    ) -> Tensor<3> {
        let mut x = embed(&self.embedding, tokens, self.dtype);
        for block in &self.blocks {
            let block = self.computing(block);
            x = block.forward(x, &mut Selections::new(), &mut see);
        }
        self.unembed(x)
    }

    /// A part of the model as it computes: a copy of its parameters in the type of the activations, whose gradients
    /// arrive at the f32 originals through the cast. An update of a 16-bit parameter would mostly be rounded away.
    fn computing<M: Module>(&self, part: &M) -> M {
        match self.dtype {
            FloatDType::F32 => part.clone(),
            dtype => part.clone().map(&mut CastTo(dtype)),
        }
    }

    /// Mean cross-entropy of the targets, in nats a byte, of shape `[1]`.
    pub fn loss(&self, inputs: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        mean_loss(self.logits(inputs, |_, _| {}), targets)
    }

    /// The [`loss`](Self::loss), and what computes the gradients of all parameters once it is called.
    pub fn loss_and_backward(
        &self,
        inputs: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> (Tensor<1>, Backward<'_>) {
        if self.activations == Activations::Kept {
            let loss = self.loss(inputs, targets);
            let kept = loss.clone();
            let backward = move || GradientsParams::from_grads(kept.backward(), self);
            return (loss, Box::new(backward));
        }
        // ANCHOR: checkpointed
        let x = embed(&self.embedding, inputs, self.dtype);
        let stack = Checkpointed::forward(&self.blocks, x, |block, x, selections| {
            // The copies for a block are made again, too.
            self.computing(block).forward(x, selections, &mut |_, _| {})
        });
        let loss = mean_loss(self.unembed(stack.output()), targets);
        // ANCHOR_END: checkpointed
        let kept = loss.clone();
        (loss, Box::new(move || stack.backward(&kept, self)))
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
        (mean_loss(logits, targets), selections)
    }

    /// The gradients of all scores' parameters, for the metrics.
    pub fn score_gradients(&self, grads: &GradientsParams) -> SelectionInput {
        let layers = self.blocks.iter().map(|block| &block.attention);
        layers.fold(SelectionInput::new(), |input, layer| {
            input.gradients_in(layer.scorer(), grads)
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

    /// The embedding read backwards: a byte's logit is the product with its own vector.
    fn unembed(&self, x: Tensor<3>) -> Tensor<3> {
        let unembedding = self.computing(&self.embedding).weight.val().transpose();
        product(normalised(&self.computing(&self.norm), x), unembedding)
    }
}

/// The backward pass of a loss: the gradients of all parameters.
pub type Backward<'a> = Box<dyn FnOnce() -> GradientsParams + 'a>;

impl Block {
    /// `[batch, seq, d_model]` to the same shape.
    fn forward(
        &self,
        x: Tensor<3>,
        selections: &mut Selections,
        see: &mut impl FnMut(&DynamicMaskAttention, &Tensor<3>),
    ) -> Tensor<3> {
        let normal = normalised(&self.attention_norm, x.clone());
        see(&self.attention, &normal);
        let x = x + selections.attend(&self.attention, normal);
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
        let up = linear(&self.feed_forward.linear_outer, normal);
        x + linear(&self.feed_forward_out, swiglu(gate, up))
    }
}

/// The norm's own result, by one pass over memory instead of four; its weight's gradient by two short ones instead of a
/// sum over all tokens in each thread. The backward pass makes it again instead of keeping it.
fn normalised(norm: &RmsNorm, x: Tensor<3>) -> Tensor<3> {
    rms_norm(x, norm.gamma.val(), norm.epsilon as f32)
}

/// The mean over all tokens.
fn mean_loss(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
}

/// Casts every float parameter, within the autodiff graph.
pub struct CastTo(pub FloatDType);

impl ModuleMapper for CastTo {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.cast(self.0))
    }
}
