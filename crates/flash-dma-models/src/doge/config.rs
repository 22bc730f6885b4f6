//! The configuration of a Doge.

use super::error::ModelError;
use crate::nn::{DecoderBlockConfig, ExpertsConfig, FeedForwardConfig, Residual};
use burn::config::Config;
use burn::module::Initializer;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, QkNorm, Rope, Scores, Selection};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Scaling of the rotary frequencies for long sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    /// None: every position has its plain angle.
    #[default]
    Plain,
    /// Dynamic scaling by this factor past `max_position_embeddings`. Up to there it is the plain encoding; longer
    /// sequences are refused.
    Dynamic(f64),
}

/// Configuration of a [`Doge`](super::Doge). The defaults are those of `transformers`.
///
/// ```
/// use flash_dma_models::doge::DogeConfig;
///
/// // 256 features, 8 blocks, 2 query heads on 1 key/value head.
/// let config = DogeConfig::doge_20m();
/// assert_eq!((config.heads, config.resolved_kv_heads(), config.resolved_head_dim()), (2, 1, 128));
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct DogeConfig {
    /// Features per token.
    pub hidden_size: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads, a divisor of `heads`. Default: `heads`.
    pub kv_heads: Option<usize>,
    /// Features per head. Default: `hidden_size / heads`.
    pub head_dim: Option<usize>,
    /// Hidden features of the feed-forward networks. Default: twice `hidden_size`.
    pub intermediate_size: Option<usize>,
    /// Number of tokens in the vocabulary.
    #[config(default = 32768)]
    pub vocab_size: usize,
    /// Number of keys that each query keeps.
    #[config(default = 2048)]
    pub keep_window_size: usize,
    /// Maximum length of a pass over whole sequences.
    #[config(default = 2048)]
    pub max_position_embeddings: usize,
    /// Base of the rotary frequencies.
    #[config(default = 10000.0)]
    pub rope_theta: f32,
    /// Scaling of the rotary frequencies for long sequences.
    #[config(default = "RopeScaling::Plain")]
    pub rope_scaling: RopeScaling,
    /// Epsilon of every RMS norm.
    #[config(default = 1e-6)]
    pub rms_norm_eps: f64,
    /// Normalises q and k per head. Current files always have these norms; older ones did not.
    #[config(default = true)]
    pub qk_norm: bool,
    /// Adds biases to the projections of the attention layers.
    #[config(default = false)]
    pub attention_bias: bool,
    /// Adds biases to the feed-forward networks.
    #[config(default = false)]
    pub mlp_bias: bool,
    /// Uses the transposed embedding for the logits, instead of a linear layer.
    #[config(default = false)]
    pub tie_word_embeddings: bool,
    /// Routed experts next to every feed-forward network. Default: none.
    pub experts: Option<ExpertsConfig>,
    /// Standard deviation of new parameters.
    #[config(default = 0.02)]
    pub initializer_range: f64,
    /// Other fields of `config.json`, such as special tokens, which are written back unchanged.
    #[config(default = "Map::new()")]
    pub other: Map<String, Value>,
}

impl DogeConfig {
    /// The sizes of Doge-20M.
    #[must_use]
    pub fn doge_20m() -> Self {
        Self::published([256, 8, 2])
    }

    /// The sizes of Doge-60M.
    #[must_use]
    pub fn doge_60m() -> Self {
        Self::published([512, 16, 4])
    }

    fn published([hidden_size, layers, heads]: [usize; 3]) -> Self {
        Self::new(hidden_size, layers, heads)
            .with_kv_heads(Some(heads / 2))
            .with_rope_scaling(RopeScaling::Dynamic(4.0))
            .with_tie_word_embeddings(true)
    }

    /// Features per head, configured or derived.
    #[must_use]
    pub fn resolved_head_dim(&self) -> usize {
        let derived = self.hidden_size / self.heads.max(1);
        self.head_dim.unwrap_or(derived)
    }

    /// Number of key/value heads, configured or derived.
    #[must_use]
    pub fn resolved_kv_heads(&self) -> usize {
        self.kv_heads.unwrap_or(self.heads)
    }

    /// Hidden features of the feed-forward networks, configured or derived.
    #[must_use]
    pub fn resolved_intermediate_size(&self) -> usize {
        self.intermediate_size.unwrap_or(2 * self.hidden_size)
    }

    /// The tokens that end a text (`eos_token_id`), if the configuration names any.
    #[must_use]
    pub fn end_tokens(&self) -> Vec<usize> {
        let number = |value: &Value| value.as_u64().map(|token| token as usize);
        match self.other.get("eos_token_id") {
            Some(Value::Array(tokens)) => tokens.iter().filter_map(number).collect(),
            Some(token) => number(token).into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Configuration of every block.
    #[must_use]
    pub fn block(&self) -> DecoderBlockConfig {
        let attention = DynamicMaskAttentionConfig::new(self.hidden_size, self.heads)
            .with_n_kv_heads(self.kv_heads)
            .with_head_dim(self.head_dim)
            .with_scores(Scores::Dma)
            .with_selection(Selection::keep(self.keep_window_size))
            .with_rope(Some(
                Rope::new(self.max_position_embeddings).with_base(self.rope_theta),
            ))
            .with_qk_norm(match self.qk_norm {
                true => QkNorm::Rms(self.rms_norm_eps),
                false => QkNorm::None,
            })
            .with_bias(self.attention_bias)
            .with_initializer(self.initializer());
        let feed_forward = FeedForwardConfig::new(self.resolved_intermediate_size())
            .with_bias(self.mlp_bias)
            .with_experts(self.experts);
        DecoderBlockConfig::new(attention, feed_forward)
            .with_residual(Residual::Learned)
            .with_norm_epsilon(self.rms_norm_eps)
    }

    pub(super) fn initializer(&self) -> Initializer {
        Initializer::Normal {
            mean: 0.0,
            std: self.initializer_range,
        }
    }

    /// Checks what the attention layer does not see.
    pub(super) fn check(&self) -> Result<(), ModelError> {
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.resolved_intermediate_size()),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(ModelError::config(format!("{name} is 0")));
        }
        let Some(experts) = &self.experts else {
            return Ok(());
        };
        let most = experts.keys().pow(2);
        if (1..=most).contains(&experts.per_token) {
            return Ok(());
        }
        Err(ModelError::config(format!(
            "num_experts_per_tok is {} and must be from 1 to {most}, of {} experts",
            experts.per_token, experts.experts
        )))
    }
}
