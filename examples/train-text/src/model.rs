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

use crate::turns;
use burn::module::{ModuleMapper, Param};
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig, SwiGlu,
    SwiGluConfig,
};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn_flash_dma::cache::AttentionCache;
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, RoundRobin, ScoreForm};
use burn_flash_dma::train::{Checkpointed, SelectionInput, Selections, embed, token_losses};
use burn_flash_dma::{
    AttentionError, Intervals, LeaveOneOut, RankSoftmax, ScoreRole, linear, product, rms_norm,
    swiglu,
};
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

/// What decides which keys of its window a layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Keys {
    /// Scores of the paper's form, which are added to the logits.
    Zoh,
    /// Linear scores that only rank the keys, and recent keys. With a window that hides no key, plain attention.
    Learned,
    /// The position: the last keys, by a layer with the parameters of `Learned`. With a window that hides no key, plain
    /// attention.
    Sliding,
}

/// How the layers know where a key is. Layers are counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Positions {
    /// Rotary encoding in every layer.
    Rope,
    /// Odd layers are local: rotary encoding, and the last `window` keys whatever the model's own window and keys are.
    /// Even layers have the model's window and keys, and no encoding, so nothing in them depends on the length.
    RopeInLocalLayers {
        /// Keys that a query of a local layer attends to.
        window: usize,
    },
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
    /// Longest sequence of a pass, which the table of the rotary position encoding is made for.
    pub context: usize,
    /// Keys a query may attend to; `context` or more is dense attention.
    pub window: usize,
    /// Element type of the activations. The parameters and the optimiser's state stay f32.
    #[config(default = "FloatDType::F32")]
    pub dtype: FloatDType,
    /// What is kept of the blocks for the backward pass.
    #[config(default = "Activations::Kept")]
    pub activations: Activations,
    /// What decides which keys of its window a layer keeps.
    #[config(default = "Keys::Zoh")]
    pub keys: Keys,
    /// The last keys that [`Keys::Learned`] keeps whatever their scores, counted in the window. Default: a quarter of it.
    pub recent: Option<usize>,
    /// How much higher a token ranks than one before it with [`Keys::Learned`], see
    /// [`DynamicMaskAttentionConfig::recency_slope`]. Default: 0.
    pub recency_slope: Option<f64>,
    /// Factor on the gradient that tokens get through their scores with [`Keys::Learned`], see
    /// [`DynamicMaskAttentionConfig::token_gradient_scale`]. Default: 1.
    pub token_gradient_scale: Option<f64>,
    /// What the scores of kept keys learn with [`Keys::Learned`], see [`DynamicMaskAttentionConfig::leave_one_out`].
    /// Default: nothing.
    pub leave_one_out: Option<LeaveOneOut>,
    /// What the scores of a head compete for with [`Keys::Learned`], see [`DynamicMaskAttentionConfig::rank_softmax`].
    /// Default: nothing.
    pub rank_softmax: Option<RankSoftmax>,
    /// How the tokens are dealt to the heads of the first layer that has the model's keys, with [`Keys::Learned`]; those
    /// behind it have longer runs, see [`turns::of_layer`]. Default: they are not.
    pub round_robin: Option<RoundRobin>,
    /// Numbers of layers, counted from 1, that attend to all keys whatever the model's window is; local ones stay
    /// local. Default: none.
    #[config(default = "Vec::new()")]
    pub dense_layers: Vec<usize>,
    /// The keys ranked next whose scores learn with [`Keys::Learned`]. Default: the layer's own number.
    pub runners_up: Option<usize>,
    /// Whether the softmax of every layer has a learned logit per head that has no key. Default: no.
    pub learnable_sink: Option<bool>,
    /// How the layers know where a key is.
    #[config(default = "Positions::Rope")]
    pub positions: Positions,
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
            blocks: (1..=self.layers)
                .map(|number| self.init_block(number, device))
                .collect(),
            norm: RmsNormConfig::new(self.d_model).init(device),
            dtype: self.dtype,
            activations: self.activations,
        }
    }

    /// The attention of the layer `number`, counted from 1.
    fn attention(&self, number: usize) -> DynamicMaskAttentionConfig {
        let layer = DynamicMaskAttentionConfig::new(self.d_model, self.heads)
            .with_n_kv_heads(Some(self.kv_heads))
            .with_learnable_sink(self.learnable_sink.unwrap_or(false));
        let placed = layer.clone().with_max_seq_len(Some(self.context));
        let (layer, index) = match self.positions {
            Positions::Rope => (placed, number - 1),
            Positions::RopeInLocalLayers { window } if number % 2 == 1 => {
                return sliding(ranking(placed), window);
            }
            Positions::RopeInLocalLayers { .. } => (layer, number / 2 - 1),
        };
        match self.dense_layers.contains(&number) {
            true => ranking(layer).with_keep_window(None),
            false => self.keeping(layer, index),
        }
    }

    /// A layer with the model's window and keys, of this index among all that have them.
    fn keeping(
        &self,
        layer: DynamicMaskAttentionConfig,
        index: usize,
    ) -> DynamicMaskAttentionConfig {
        let window = self.window;
        match self.keys {
            Keys::Zoh => layer
                .with_score_form(ScoreForm::Zoh)
                .with_score_role(Some(ScoreRole::RankAndBias))
                .with_keep_window(Some(window))
                .with_recent(Some(0))
                .with_runners_up(Some(0)),
            _ if window >= self.context => ranking(layer).with_keep_window(None),
            Keys::Learned => ranking(layer)
                .with_keep_window(Some(window))
                .with_recent(Some(self.recent.unwrap_or(window / 4)))
                .with_recency_slope(self.recency_slope)
                .with_round_robin(self.round_robin.map(|dealt| turns::of_layer(dealt, index)))
                .with_token_gradient_scale(self.token_gradient_scale)
                .with_leave_one_out(self.leave_one_out)
                .with_rank_softmax(self.rank_softmax)
                .with_runners_up(self.runners_up),
            Keys::Sliding => sliding(ranking(layer), window),
        }
    }

    fn init_block(&self, number: usize, device: &Device) -> Block {
        // SwiGLU has three matrices where a plain network has two: 8/3 of the width instead of 4
        // keeps the parameters equal. A multiple of 32 suits the matrix units.
        let hidden = (self.d_model * 8 / 3).next_multiple_of(32);
        Block {
            attention_norm: RmsNormConfig::new(self.d_model).init(device),
            attention: self.attention(number).init(device),
            feed_forward_norm: RmsNormConfig::new(self.d_model).init(device),
            feed_forward: SwiGluConfig::new(self.d_model, hidden).init(device),
            feed_forward_out: LinearConfig::new(hidden, self.d_model)
                .with_bias(false)
                .init(device),
        }
    }
}

/// A layer whose scores are linear, rank the keys and are added to nothing.
fn ranking(layer: DynamicMaskAttentionConfig) -> DynamicMaskAttentionConfig {
    layer
        .with_score_form(ScoreForm::Linear)
        .with_score_role(Some(ScoreRole::Rank))
}

/// A layer that keeps the last `window` keys: its scores have nothing to rank, and do not learn.
fn sliding(layer: DynamicMaskAttentionConfig, window: usize) -> DynamicMaskAttentionConfig {
    layer
        .with_keep_window(Some(window))
        .with_recent(Some(window))
        .with_runners_up(Some(0))
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
        mean_loss(self.logits(inputs, |_, _| {}), targets, None)
    }

    /// Cross-entropy of each target, in nats, `[batch, seq]`.
    pub fn token_losses(&self, inputs: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<2> {
        let shape = targets.dims();
        let logits = self.logits(inputs, |_, _| {}).flatten(0, 1);
        token_losses(logits, targets.flatten(0, 1)).reshape(shape)
    }

    /// The [`loss`](Self::loss), and what computes the gradients of all parameters once it is called.
    pub fn loss_and_backward(
        &self,
        inputs: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> (Tensor<1>, Backward<'_>) {
        self.weighted_loss_and_backward(inputs, targets, None)
    }

    /// As [`loss_and_backward`](Self::loss_and_backward), each target's loss times its weight, `[batch, seq]`, before
    /// the mean over all targets.
    pub fn weighted_loss_and_backward(
        &self,
        inputs: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        weights: Option<Tensor<2>>,
    ) -> (Tensor<1>, Backward<'_>) {
        if self.activations == Activations::Kept {
            let loss = mean_loss(self.logits(inputs, |_, _| {}), targets, weights);
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
        let loss = mean_loss(self.unembed(stack.output()), targets, weights);
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
        (mean_loss(logits, targets, None), selections)
    }

    /// The gradients of all scores' parameters, for the metrics.
    pub fn score_gradients(&self, grads: &GradientsParams) -> SelectionInput {
        let layers = self.blocks.iter().map(|block| &block.attention);
        layers.fold(SelectionInput::new(), |input, layer| {
            input.gradients_in(layer.scorer(), grads)
        })
    }
    // ANCHOR_END: selections

    /// What each layer selects, and the scores `[batch, kv_heads, seq]` that it ranks the keys by; `None` of a layer
    /// that attends to all keys.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the device fails.
    pub fn selections(
        &self,
        tokens: Tensor<2, Int>,
    ) -> Result<Vec<Option<(Intervals, Tensor<3>)>>, AttentionError> {
        let mut seen = Vec::with_capacity(self.blocks.len());
        self.logits(tokens, |layer, x| {
            let pruned = layer.options().keep_window.is_some();
            let selected = || {
                Ok((
                    layer.try_selection(x.clone())?,
                    layer.try_scores(x.clone())?,
                ))
            };
            seen.push(pruned.then(selected).transpose());
        });
        seen.into_iter().collect()
    }

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

/// The mean over all tokens, times their weights if there are any.
fn mean_loss(logits: Tensor<3>, targets: Tensor<2, Int>, weights: Option<Tensor<2>>) -> Tensor<1> {
    let losses = token_losses(logits.flatten(0, 1), targets.flatten(0, 1));
    match weights {
        Some(weights) => (losses * weights.flatten(0, 1)).mean(),
        None => losses.mean(),
    }
}

/// Casts every float parameter, within the autodiff graph.
pub struct CastTo(pub FloatDType);

impl ModuleMapper for CastTo {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.cast(self.0))
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    fn layers(config: TextModelConfig) -> Vec<DynamicMaskAttention> {
        let blocks = config.init(&Device::flex()).blocks;
        blocks.into_iter().map(|block| block.attention).collect()
    }

    fn config(window: usize) -> TextModelConfig {
        TextModelConfig::new(32, 2, 2, 1, 64, window)
    }

    #[test]
    fn scores_have_the_paper_s_form_unless_the_configuration_says_otherwise() {
        for layer in layers(config(16)) {
            assert_eq!(layer.scorer().form(), ScoreForm::Zoh);
            assert_eq!(layer.score_role(), ScoreRole::RankAndBias);
            assert_eq!(layer.options().keep_window, Some(16));
        }
    }

    #[test]
    fn learned_and_sliding_keys_differ_in_what_is_recent_and_not_in_their_parameters() {
        let text = || Tensor::<1, Int>::arange(0..64, &Device::flex()).reshape([1, 64]);
        for (keys, recent) in [(Keys::Learned, 4.0), (Keys::Sliding, 16.0)] {
            let config = config(16).with_keys(keys);
            for layer in layers(config.clone()) {
                assert_eq!(layer.scorer().form(), ScoreForm::Linear);
                assert_eq!(layer.score_role(), ScoreRole::Rank);
            }
            let selections = config.init(&Device::flex()).selections(text());
            for selection in selections.expect("it fits") {
                let (intervals, _) = selection.expect("a window");
                // Of the pairs of the first positions all are recent, so the share is a little more.
                let share = intervals.stats().recent;
                assert!((0.0..0.1).contains(&(share - recent / 16.0)), "{share}");
            }
            // A window that hides nothing is none.
            let mut dense = config;
            dense.window = 64;
            let layers = layers(dense);
            let windows = layers.iter().map(|layer| layer.options().keep_window);
            assert!(windows.eq([None; 2]));
        }
    }

    #[test]
    fn odd_layers_may_be_local_and_the_others_without_positions() {
        let positions = Positions::RopeInLocalLayers { window: 8 };
        let config = config(16)
            .with_keys(Keys::Learned)
            .with_positions(positions);
        let layers = layers(config);
        assert_eq!(layers[0].options().keep_window, Some(8));
        assert!(layers[0].rope.is_some());
        assert_eq!(layers[1].options().keep_window, Some(16));
        assert!(layers[1].rope.is_none());
    }

    #[test]
    fn named_layers_attend_to_all_keys_where_others_keep_some() {
        for keys in [Keys::Learned, Keys::Sliding] {
            let config = config(16).with_keys(keys).with_dense_layers(vec![2]);
            let windows = layers(config).into_iter().map(|l| l.options().keep_window);
            assert!(windows.eq([Some(16), None]));
        }
    }
}
