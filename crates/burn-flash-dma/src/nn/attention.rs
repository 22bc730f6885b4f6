//! The attention layer of Dynamic Mask Attention.

use super::by_position::ByPosition;
use super::config::{Logits, QkNorm, Rope, Rule, ScoreLearning, Selection, warn_of_idle_scores};
use super::dropout::CallDropout;
use super::heads::{Starts, check_heads, check_weights, linears, norms, rotary};
use super::inline::Inline;
use super::input::DynamicMaskInput;
use super::scorer::{Scorer, Scores};
use crate::functions::selection::Intervals;
use crate::validate::{check_shape, same_device, scores_as_f32};
use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::{Linear, RmsNorm, RotaryEncoding};
use burn::tensor::{Device, Tensor};
use flash_dma_problem::{
    AttentionError, AttentionOptions, Dropout, ScoreRole, SelectionRule, TensorName,
};

#[cfg(feature = "autodiff")]
mod carried;
mod pass;

#[cfg(feature = "autodiff")]
pub(crate) use carried::{Carry, PartDocuments, PartPass, PartRanks, PartSelection};

/// Configuration of [`DynamicMaskAttention`].
///
/// ```
/// # use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Selection};
/// let config = DynamicMaskAttentionConfig::new(256, 8)
///     .with_n_kv_heads(Some(2))
///     .with_selection(Selection::keep(512))
///     .with_rope(Some(Rope::new(2048)));
/// assert_eq!(config.resolved_head_dim(), 32);
/// ```
#[derive(Config, Debug)]
pub struct DynamicMaskAttentionConfig {
    /// Features per token.
    pub d_model: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key/value heads, a divisor of `n_heads`. Default: `n_heads`.
    pub n_kv_heads: Option<usize>,
    /// Features per head, a multiple of 8 up to 256. Default: `d_model / n_heads`.
    pub head_dim: Option<usize>,
    /// Kind of the scores. Default: [`Scores::Ranking`], which cannot be trained under a mask that differs between
    /// queries.
    #[config(default = "Scores::Ranking")]
    pub scores: Scores,
    /// Which keys a query keeps. Default: all.
    #[config(default = "Selection::new()")]
    pub selection: Selection,
    /// How the scores learn from their ranks. Default: [`ScoreLearning::of`] the scores.
    pub learning: Option<ScoreLearning>,
    /// How the logits are computed and turned into weights.
    #[config(default = "Logits::new()")]
    pub logits: Logits,
    /// Rotary position encoding of q and k. Default: none.
    pub rope: Option<Rope>,
    /// RMS norm of each head of q and k, before the rotary encoding. Default: epsilon 1e-5.
    #[config(default = "QkNorm::default()")]
    pub qk_norm: QkNorm,
    /// Adds biases to the four projections, and with [`Scores::Dma`] to that of the scores. Default: false.
    #[config(default = false)]
    pub bias: bool,
    /// Initialiser of the four projections. Default: normal, mean 0, standard deviation 0.02.
    #[config(default = "Initializer::Normal{mean:0.0, std:0.02}")]
    pub initializer: Initializer,
}

/// Self-attention in which each head keeps the keys that its learned scores rank highest.
///
/// `x -> q, k, v`; RMS norm per head and rotary encoding of q and k; [`Scores`], in f32 whatever the type of the
/// parameters; dynamic-mask attention; output projection. `x` should already be normalised, as in a pre-norm block.
///
/// Dropout seeds follow from a random number drawn when the layer is made, so [`Device::seed`] before that makes a
/// single-threaded run repeatable. A recorded graph of launches would repeat its mask.
///
/// In a record, the parameters of the scores (`dt_proj`, `dt_bias` and `a`, or `score_proj`) stand next to the
/// projections. It loads only into layers with the same kind of scores.
#[derive(Module, Debug)]
pub struct DynamicMaskAttention {
    /// `[d_model, n_heads * head_dim]`.
    pub q_proj: Linear,
    /// `[d_model, n_kv_heads * head_dim]`.
    pub k_proj: Linear,
    /// `[d_model, n_kv_heads * head_dim]`.
    pub v_proj: Linear,
    /// `[n_heads * head_dim, d_model]`.
    pub o_proj: Linear,
    scorer: Inline,
    /// Learned sink logit of each query head: `[n_heads]`, initialised to zero.
    pub sink_logits: Option<Param<Tensor<1>>>,
    /// Normalises the features of each head of q.
    pub q_norm: Option<RmsNorm>,
    /// Normalises the features of each head of k.
    pub k_norm: Option<RmsNorm>,
    /// Rotary encoding of q and k.
    pub rope: Option<RotaryEncoding>,
    d_model: usize,
    n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) head_dim: usize,
    dropout: Option<CallDropout>,
    #[module(skip)]
    kind: Scores,
    #[module(skip)]
    rule: Rule,
    pub(super) by_position: Option<ByPosition>,
    #[module(skip)]
    pub(super) learning: ScoreLearning,
    #[module(skip)]
    options: AttentionOptions,
}

impl DynamicMaskAttentionConfig {
    /// Features per head, configured or derived.
    #[must_use]
    pub fn resolved_head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.d_model / self.n_heads.max(1))
    }

    /// Number of key/value heads, configured or derived.
    #[must_use]
    pub fn resolved_kv_heads(&self) -> usize {
        self.n_kv_heads.unwrap_or(self.n_heads)
    }

    twin! {
        /// Creates the module on a device.
        pub fn init(&self, device: &Device) -> DynamicMaskAttention = Self::try_init;
    }

    /// Like [`init`](Self::init), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the heads, the head dimension, the selection, the logits, the epsilon of the norms or
    /// the rotary encoding are refused.
    pub fn try_init(&self, device: &Device) -> Result<DynamicMaskAttention, AttentionError> {
        let (head_dim, kv_heads) = (self.resolved_head_dim(), self.resolved_kv_heads());
        let logits = &self.logits;
        let options = AttentionOptions {
            keep_window: self.selection.window,
            causal: logits.causal,
            scale: logits.scale,
            softcap: logits.softcap,
            alibi: logits.alibi,
            ..AttentionOptions::default()
        };
        check_heads([self.n_heads, kv_heads], head_dim, true, &options)?;
        check_weights([self.d_model.max(kv_heads), self.n_heads * head_dim])?;
        let rule = Rule::try_new(&self.selection, self.scores, logits.causal)?;
        let (selection, causal) = (&self.selection, logits.causal);
        let by_position = ByPosition::try_new(selection, self.scores, causal, kv_heads, device)?;

        let [q_norm, k_norm] = norms(self.qk_norm, head_dim, device)?;
        let rope = rotary(&self.rope, head_dim, device)?;
        let dropout = (logits.dropout != 0.0)
            .then(|| CallDropout::try_new(logits.dropout, device))
            .transpose()?;
        let learning = self.learning.clone();
        let learning = learning.unwrap_or_else(|| ScoreLearning::of(self.scores));
        warn_of_idle_scores(
            "DynamicMaskAttention",
            self.scores,
            self.selection.window.map(|window| rule.of(Some(window))),
            &learning,
        );
        let linear = linears(self.bias, &self.initializer, device);
        let (q_width, kv_width) = (self.n_heads * head_dim, kv_heads * head_dim);
        Ok(DynamicMaskAttention {
            q_proj: linear(self.d_model, q_width),
            k_proj: linear(self.d_model, kv_width),
            v_proj: linear(self.d_model, kv_width),
            o_proj: linear(q_width, self.d_model),
            sink_logits: (logits.sink).then(|| Initializer::Zeros.init([self.n_heads], device)),
            scorer: Inline(Scorer::new(
                self.scores,
                [self.d_model, kv_heads, head_dim],
                self.bias,
                device,
            )),
            q_norm,
            k_norm,
            rope,
            d_model: self.d_model,
            n_heads: self.n_heads,
            n_kv_heads: kv_heads,
            head_dim,
            dropout,
            kind: self.scores,
            rule,
            by_position,
            learning,
            options,
        })
    }
}

impl DynamicMaskAttention {
    twin! {
        /// Attention over a sequence, `[batch, len, d_model]` to the same shape. Takes a tensor or a
        /// [`DynamicMaskInput`].
        pub fn forward(&self, input: impl Into<DynamicMaskInput>) -> Tensor<3> = Self::try_forward;
    }

    /// Like [`forward`](Self::forward), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the last axis is not `d_model`, the sequence is longer than the rotary encoding, the
    /// lengths, documents or mask do not fit, documents meet a layer that is not causal, or a mask that differs
    /// between queries meets, in training, runners-up or scores that only rank. Nothing is computed then, except
    /// scores in the last case.
    /// the last case.
    pub fn try_forward(
        &self,
        input: impl Into<DynamicMaskInput>,
    ) -> Result<Tensor<3>, AttentionError> {
        let tokens = self.tokens(input.into())?;
        let [q, k, v] = self.project(tokens.x.clone(), Starts::Positions(&[]))?;
        let scores = self.scores_with_values(&tokens, &v)?;
        let dropout = self.draw_dropout(&tokens.x);
        self.attend([q, k, v], scores, &tokens, dropout)
    }

    twin! {
        /// [`forward`](Self::forward) with given scores instead of the layer's own: `[batch, n_kv_heads, len]`, f32
        /// (f16 and bf16 are cast up), used in the layer's [`ScoreRole`]. Padding is hidden whatever its scores.
        pub fn forward_with_scores(
            &self, input: impl Into<DynamicMaskInput>, scores: Tensor<3>
        ) -> Tensor<3> = Self::try_forward_with_scores;
    }

    /// Like [`forward_with_scores`](Self::forward_with_scores), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`try_forward`](Self::try_forward), or [`AttentionError`] if the shape, the element type or the
    /// device of the scores does not fit.
    pub fn try_forward_with_scores(
        &self,
        input: impl Into<DynamicMaskInput>,
        scores: Tensor<3>,
    ) -> Result<Tensor<3>, AttentionError> {
        let tokens = self.tokens(input.into())?;
        let [batch, len, _] = tokens.x.dims();
        let expected = [batch, self.n_kv_heads, len];
        check_shape(TensorName::Scores, &scores.dims(), &expected)?;
        same_device(&tokens.x.device(), TensorName::Scores, scores.device())?;
        let scores = scores_as_f32(scores)?;
        let dropout = self.draw_dropout(&tokens.x);
        let rows = self.project(tokens.x.clone(), Starts::Positions(&[]))?;
        self.attend(rows, scores, &tokens, dropout)
    }

    twin! {
        /// [`forward`](Self::forward), and the selection it made: a constant, for
        /// [`forward_with_intervals`](Self::forward_with_intervals).
        pub fn forward_and_intervals(
            &self, input: impl Into<DynamicMaskInput>
        ) -> (Tensor<3>, Intervals) = Self::try_forward_and_intervals;
    }

    /// Like [`forward_and_intervals`](Self::forward_and_intervals), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`try_forward`](Self::try_forward), or [`AttentionError::MaskedSelection`] under a mask that differs
    /// between queries, whose selection is not one interval per key.
    pub fn try_forward_and_intervals(
        &self,
        input: impl Into<DynamicMaskInput>,
    ) -> Result<(Tensor<3>, Intervals), AttentionError> {
        let input = input.into();
        let dropout = self.draw_dropout(input.tokens());
        self.select_and_attend(input, None, dropout)
    }

    twin! {
        /// [`forward`](Self::forward) with an earlier selection, to recompute a layer as checkpointing does
        /// (`train::Checkpointed`). The scores are computed again, and rank the runners-up of the first time. With
        /// dropout the mask differs; `train::Selections` keeps that too.
        pub fn forward_with_intervals(
            &self, input: impl Into<DynamicMaskInput>, intervals: &Intervals
        ) -> Tensor<3> = Self::try_forward_with_intervals;
    }

    /// Like [`forward_with_intervals`](Self::forward_with_intervals), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`try_forward_and_intervals`](Self::try_forward_and_intervals), or [`AttentionError`] if the
    /// intervals have another shape, device or window.
    pub fn try_forward_with_intervals(
        &self,
        input: impl Into<DynamicMaskInput>,
        intervals: &Intervals,
    ) -> Result<Tensor<3>, AttentionError> {
        let input = input.into();
        let dropout = self.draw_dropout(input.tokens());
        let (out, _) = self.select_and_attend(input, Some(intervals), dropout)?;
        Ok(out)
    }

    twin! {
        /// Scores of the tokens, `[batch, n_kv_heads, len]`, f32, including what depends on positions (recency,
        /// turns); −∞ for padding and for keys that the mask hides from every query.
        pub fn scores(&self, input: impl Into<DynamicMaskInput>) -> Tensor<3> = Self::try_scores;
    }

    /// Like [`scores`](Self::scores), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`try_forward`](Self::try_forward).
    pub fn try_scores(
        &self,
        input: impl Into<DynamicMaskInput>,
    ) -> Result<Tensor<3>, AttentionError> {
        self.scores_of(&self.tokens(input.into())?)
    }

    twin! {
        /// The selection that [`forward`](Self::forward) makes for an input, for inspection.
        pub fn selection(&self, input: impl Into<DynamicMaskInput>) -> Intervals
            = Self::try_selection;
    }

    /// Like [`selection`](Self::selection), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`try_forward`](Self::try_forward), or [`AttentionError::MaskedSelection`] under a mask that differs
    /// between queries, whose selection is not one interval per key.
    pub fn try_selection(
        &self,
        input: impl Into<DynamicMaskInput>,
    ) -> Result<Intervals, AttentionError> {
        let tokens = self.tokens(input.into())?;
        if tokens.pairs.is_some() {
            let what = "a selection to look at";
            return Err(AttentionError::MaskedSelection { what });
        }
        let scores = self.scores_of(&tokens)?;
        self.selector(tokens.documents).try_select(scores)
    }

    /// The layer with another number of keys per query, `None` for all of them.
    ///
    /// # Panics
    ///
    /// If [`try_set_keep_window`](Self::try_set_keep_window) returns an error, with that error's text.
    #[must_use]
    pub fn with_keep_window(mut self, window: impl Into<Option<usize>>) -> Self {
        self.set_keep_window(window);
        self
    }

    twin! {
        /// Sets how many keys each query keeps from now on, `None` for all: for a window that shrinks in training, or
        /// another budget afterwards. An existing cache keeps its window.
        pub fn set_keep_window(&mut self, window: impl Into<Option<usize>>)
            = Self::try_set_keep_window;
    }

    /// Like [`set_keep_window`](Self::set_keep_window), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::ZeroWindow`], or [`AttentionError::WindowParts`] if the layer's recent keys and sinks do not
    /// fit; the window is unchanged then.
    pub fn try_set_keep_window(
        &mut self,
        window: impl Into<Option<usize>>,
    ) -> Result<(), AttentionError> {
        let window = window.into();
        self.rule.check(window)?;
        self.options.keep_window = window;
        Ok(())
    }

    /// Turns bit-identical results across runs on or off, see [`AttentionOptions::deterministic`].
    #[must_use]
    pub fn with_deterministic(mut self, deterministic: bool) -> Self {
        self.set_deterministic(deterministic);
        self
    }

    /// Turns bit-identical results across runs on or off from now on.
    pub fn set_deterministic(&mut self, deterministic: bool) {
        self.options.deterministic = deterministic;
    }

    /// Dropout of the next call on these tokens; `None` outside training.
    pub(crate) fn draw_dropout(&self, tokens: &Tensor<3>) -> Option<Dropout> {
        (self.dropout.as_ref()).and_then(|dropout| dropout.draw(&tokens.device()))
    }

    /// True if ranks of a head compete.
    #[cfg(feature = "autodiff")]
    pub(crate) fn competes(&self) -> bool {
        self.learning.compete
    }

    /// Parameters of the scores.
    #[must_use]
    pub fn scorer(&self) -> &Scorer {
        &self.scorer.0
    }

    /// Options of the layer's attention, without dropout.
    #[must_use]
    pub fn options(&self) -> AttentionOptions {
        self.options
    }

    /// Role of the layer's scores.
    #[must_use]
    pub fn score_role(&self) -> ScoreRole {
        self.kind.role()
    }

    /// The current window, if scores decide on any part of it.
    fn ranking_window(&self) -> Option<usize> {
        let window = self.options.keep_window;
        window.filter(|&window| self.rule(window).ranked() > 0)
    }

    pub(super) fn rule(&self, window: usize) -> SelectionRule {
        self.rule.of(Some(window))
    }

    /// Name of the keys that the configuration asks to learn from ranks.
    pub(super) fn ranked_keys(&self) -> Option<&'static str> {
        self.learning.asked_for()
    }
}
