//! Cross-attention that keeps the best tokens of its context.

use super::config::{QkNorm, ScoreLearning, warn_of_idle_scores};
use super::heads::{
    check_heads, check_type, check_weights, encode, linears, merge, norms, project,
};
use super::input::DynamicMaskInput;
use super::scorer::{Scorer, Scores};
use crate::functions::attention::Attention;
use crate::functions::selection::Intervals;
use crate::functions::selector::Selector;
use crate::validate::check_shape;
use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{Linear, RmsNorm};
use burn::tensor::{Device, Tensor};
use flash_dma_problem::{AttentionError, AttentionOptions, ScoreRole, SelectionRule, TensorName};

/// Configuration of [`DynamicMaskCrossAttention`].
///
/// ```
/// # use burn_flash_dma::nn::DynamicMaskCrossAttentionConfig;
/// let config = DynamicMaskCrossAttentionConfig::new(256, 8)
///     .with_d_context(Some(512))
///     .with_n_kv_heads(Some(2))
///     .with_window(Some(128));
/// assert_eq!(config.resolved_head_dim(), 32);
/// ```
#[derive(Config, Debug)]
pub struct DynamicMaskCrossAttentionConfig {
    /// Features per token of the queries and the output.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Features per token of the context. Default: `d_model`.
    pub d_context: Option<usize>,
    /// Number of key/value heads, a divisor of `n_heads`. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// Features per head, a multiple of 8 up to 256. Default: `d_model / n_heads`.
    pub head_dim: Option<usize>,
    /// Kind of the scores of the context's tokens. Default: [`Scores::Ranking`].
    #[config(default = "Scores::Ranking")]
    pub scores: Scores,
    /// Number of context tokens each head keeps, the same for all queries. Default: all.
    pub window: Option<usize>,
    /// How the scores learn from their ranks. Default: [`ScoreLearning::of`] the scores for [`Scores::Dma`], and
    /// otherwise that of [`Scores::Added`], also for scores that only rank.
    pub learning: Option<ScoreLearning>,
    /// RMS norm of each head of q and k. Default: epsilon 1e-5.
    #[config(default = "QkNorm::default()")]
    pub qk_norm: QkNorm,
    /// Adds biases to the four projections, and with [`Scores::Dma`] to that of the scores. Default: false.
    #[config(default = false)]
    pub bias: bool,
    /// Factor on `q . k`. Default: `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Cap of the scaled product `q . k`: `c * tanh(x / c)`. Default: none.
    pub softcap: Option<f32>,
    /// Initialiser of the four projections. Default: normal, mean 0, standard deviation 0.02.
    #[config(default = "Initializer::Normal{mean:0.0, std:0.02}")]
    pub initializer: Initializer,
}

/// Attention of one sequence over another, for example a decoder's over its encoder's, in which each head keeps the
/// `window` context tokens that its learned scores rank highest, the same for all queries. The other context tokens
/// cost only their projections and the selection.
///
/// `x -> q`; `context -> k, v, scores`; RMS norm per head of q and k; attention; output projection; no rotary
/// encoding. Both inputs should already be normalised, as in a pre-norm block after an encoder's last norm.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn::tensor::{Device, Distribution, Tensor};
/// # use burn_flash_dma::nn::{DynamicMaskCrossAttentionConfig, DynamicMaskInput};
/// let device = Device::flex();
/// let layer = DynamicMaskCrossAttentionConfig::new(32, 4).with_window(Some(8)).init(&device);
/// let normal = Distribution::Normal(0.0, 1.0);
/// let context = Tensor::<3>::random([2, 50, 32], normal, &device);
///
/// // The second context has 31 tokens and padding. Its keys are made once, and serve every step of a decoder.
/// let keys = layer.keys(DynamicMaskInput::new(context).lengths([50, 31]));
/// let step = Tensor::<3>::random([2, 1, 32], normal, &device);
/// assert_eq!(layer.forward_with_keys(step, &keys).dims(), [2, 1, 32]);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct DynamicMaskCrossAttention {
    /// `[d_model, n_heads * head_dim]`.
    pub q_proj: Linear,
    /// `[d_context, n_kv_heads * head_dim]`.
    pub k_proj: Linear,
    /// `[d_context, n_kv_heads * head_dim]`.
    pub v_proj: Linear,
    /// `[n_heads * head_dim, d_model]`.
    pub o_proj: Linear,
    /// Parameters of the scores.
    pub scorer: Scorer,
    /// Normalises the features of each head of q.
    pub q_norm: Option<RmsNorm>,
    /// Normalises the features of each head of k.
    pub k_norm: Option<RmsNorm>,
    d_model: usize,
    d_context: usize,
    n_heads: usize,
    n_kv_heads: usize,
    #[module(skip)]
    kind: Scores,
    #[module(skip)]
    learning: ScoreLearning,
    #[module(skip)]
    options: AttentionOptions,
}

impl DynamicMaskCrossAttentionConfig {
    /// Features per head, configured or derived.
    #[must_use]
    pub fn resolved_head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.d_model / self.n_heads.max(1))
    }

    twin! {
        /// Creates the module on a device.
        pub fn init(&self, device: &Device) -> DynamicMaskCrossAttention = Self::try_init;
    }

    /// Like [`init`](Self::init), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the heads, the head dimension, the window, the scale, the softcap or the epsilon of the
    /// norms are refused.
    pub fn try_init(&self, device: &Device) -> Result<DynamicMaskCrossAttention, AttentionError> {
        let head_dim = self.resolved_head_dim();
        let kv_heads = self.n_kv_heads.unwrap_or(self.n_heads);
        let d_context = self.d_context.unwrap_or(self.d_model);
        let options = AttentionOptions {
            keep_window: self.window,
            causal: false,
            scale: self.scale,
            softcap: self.softcap,
            ..AttentionOptions::default()
        };
        check_heads([self.n_heads, kv_heads], head_dim, true, &options)?;
        let widest = self.d_model.max(d_context).max(kv_heads);
        check_weights([widest, self.n_heads * head_dim])?;
        let [q_norm, k_norm] = norms(self.qk_norm, head_dim, device)?;

        let learning = self.learning.clone();
        // Kept keys that learn, and ranks that compete, were measured only with causal masking.
        let learning = learning.unwrap_or_else(|| match self.scores {
            Scores::Dma => ScoreLearning::of(Scores::Dma),
            Scores::Ranking | Scores::Added => ScoreLearning::of(Scores::Added),
        });
        warn_of_idle_scores(
            "DynamicMaskCrossAttention",
            self.scores,
            self.window.map(SelectionRule::from),
            &learning,
        );
        let linear = linears(self.bias, &self.initializer, device);
        let (q_width, kv_width) = (self.n_heads * head_dim, kv_heads * head_dim);
        Ok(DynamicMaskCrossAttention {
            q_proj: linear(self.d_model, q_width),
            k_proj: linear(d_context, kv_width),
            v_proj: linear(d_context, kv_width),
            o_proj: linear(q_width, self.d_model),
            scorer: Scorer::new(
                self.scores,
                [d_context, kv_heads, head_dim],
                self.bias,
                device,
            ),
            q_norm,
            k_norm,
            d_model: self.d_model,
            d_context,
            n_heads: self.n_heads,
            n_kv_heads: kv_heads,
            kind: self.scores,
            learning,
            options,
        })
    }
}

/// Everything cross-attention needs of a context: keys, values, scores and the selection. Under autodiff the
/// gradients of every call that uses it reach the context and the parameters.
#[derive(Clone, Debug)]
pub struct CrossKeys {
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    intervals: Intervals,
}

impl CrossKeys {
    /// Scores of the context tokens, `[batch, n_kv_heads, context_len]`, f32; −∞ for padding and hidden tokens.
    #[must_use]
    pub fn scores(&self) -> &Tensor<3> {
        &self.scores
    }

    /// The selection. Every query stands at the last position, so [`live_at(context_len - 1)`](Intervals::live_at)
    /// gives the kept tokens.
    #[must_use]
    pub fn intervals(&self) -> &Intervals {
        &self.intervals
    }
}

impl DynamicMaskCrossAttention {
    twin! {
        /// Attention of `x`, `[batch, len, d_model]`, over a context, `[batch, context_len, d_context]`: a tensor, or
        /// a [`DynamicMaskInput`] with lengths or a mask per key. Returns the shape of `x`. Where a whole context is
        /// hidden, attention gives zeros.
        pub fn forward(&self, x: Tensor<3>, context: impl Into<DynamicMaskInput>) -> Tensor<3>
            = Self::try_forward;
    }

    /// Like [`forward`](Self::forward), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`try_keys`](Self::try_keys) and [`try_forward_with_keys`](Self::try_forward_with_keys).
    pub fn try_forward(
        &self,
        x: Tensor<3>,
        context: impl Into<DynamicMaskInput>,
    ) -> Result<Tensor<3>, AttentionError> {
        let context = context.into();
        self.check_queries(&x, context.x.dims()[0])?;
        self.try_forward_with_keys(x, &self.try_keys(context)?)
    }

    twin! {
        /// Prepares the keys of a context once for all queries, such as every step of a decoder.
        pub fn keys(&self, context: impl Into<DynamicMaskInput>) -> CrossKeys = Self::try_keys;
    }

    /// Like [`keys`](Self::keys), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the last axis is not `d_context`, or the lengths or the mask do not fit;
    /// [`AttentionError::SelectionNotCausal`] for documents; [`AttentionError::MaskedSelection`] for a mask that
    /// differs between queries. Nothing is computed then.
    pub fn try_keys(
        &self,
        context: impl Into<DynamicMaskInput>,
    ) -> Result<CrossKeys, AttentionError> {
        let context = context.into();
        let shape @ [batch, len, _] = context.x.dims();
        check_shape(TensorName::Tokens, &shape, &[batch, len, self.d_context])?;
        check_type(&context.x, &self.k_norm)?;
        if context.documents.is_some() {
            return Err(AttentionError::SelectionNotCausal);
        }
        if context.has_pairs() {
            let what = "cross-attention";
            return Err(AttentionError::MaskedSelection { what });
        }
        let tokens = context.try_into_tokens(self.n_kv_heads)?;
        let heads = |layer| project(layer, &tokens.x, self.n_kv_heads);
        let k = encode(heads(&self.k_proj)?, &self.k_norm, &None, 0)?;
        let v = heads(&self.v_proj)?.swap_dims(1, 2);
        let (role, learns) = (
            self.kind.role(),
            self.learning
                .in_training(self.kind, self.options.keep_window),
        );
        let (x, values) = (|| tokens.x.clone(), || Ok(v.clone()));
        let scores = self.scorer.scores(role, learns, x, values)?;
        let scores = tokens.hidden(scores);
        let intervals = self.selector().try_select(scores.clone())?;
        Ok(CrossKeys {
            k,
            v,
            scores,
            intervals,
        })
    }

    twin! {
        /// [`forward`](Self::forward) over prepared keys of a context.
        pub fn forward_with_keys(&self, x: Tensor<3>, keys: &CrossKeys) -> Tensor<3>
            = Self::try_forward_with_keys;
    }

    /// Like [`forward_with_keys`](Self::forward_with_keys), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if `x` has another width than `d_model` or another batch or device than the keys, or the
    /// keys come from a layer with other heads or another window.
    pub fn try_forward_with_keys(
        &self,
        x: Tensor<3>,
        keys: &CrossKeys,
    ) -> Result<Tensor<3>, AttentionError> {
        let shape @ [batch, _, len, head_dim] = keys.k.dims();
        self.check_queries(&x, batch)?;
        // More key/value heads would pair with other queries if their number divides that of q.
        let own = [batch, self.n_kv_heads, len, head_dim];
        check_shape(TensorName::Key, &shape, &own)?;
        let intervals = keys.intervals.max_live();
        let options = self.options.keep_window.unwrap_or(usize::MAX);
        if intervals != options {
            return Err(AttentionError::IntervalsWindow { intervals, options });
        }
        let q = project(&self.q_proj, &x, self.n_heads)?;
        let q = encode(q, &self.q_norm, &None, 0)?;
        let attention = Attention::new(q, keys.k.clone(), keys.v.clone()).options(self.options);
        let out = match self.kind.role() {
            ScoreRole::RankAndBias => attention
                .scores(keys.scores.clone())
                .intervals(&keys.intervals)
                .try_forward()?,
            ScoreRole::Rank => attention.intervals(&keys.intervals).try_forward()?,
        };
        merge(out, &self.o_proj)
    }

    /// Options of the layer's attention.
    #[must_use]
    pub fn options(&self) -> AttentionOptions {
        self.options
    }

    fn check_queries(&self, x: &Tensor<3>, batch: usize) -> Result<(), AttentionError> {
        let shape @ [_, len, _] = x.dims();
        check_shape(TensorName::Tokens, &shape, &[batch, len, self.d_model])?;
        check_type(x, &self.q_norm)
    }

    fn selector(&self) -> Selector {
        match self.options.keep_window {
            Some(window) => (self.learning).taught(Selector::top(window), window),
            None => Selector::top(usize::MAX),
        }
    }
}
