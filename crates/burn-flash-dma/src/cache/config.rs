//! Configurations of the caches.

use super::tokens::cache_element;
use burn::config::Config;
use burn::tensor::FloatDType;
use flash_dma_problem::{AttentionError, AttentionOptions, CacheShape, ScoreRole, SelectionRule};

/// Sizes and options of a [`DynamicMaskCache`](super::DynamicMaskCache).
///
/// ```
/// # use burn_flash_dma::{AttentionOptions, cache::DynamicMaskCacheConfig};
/// // 4 sequences, 2 key/value heads of 64 features, the 512 best keys of each.
/// let options = AttentionOptions::new().with_keep_window(512);
/// let config = DynamicMaskCacheConfig::new(4, 2, 64, options);
/// assert_eq!(config.bytes().unwrap(), 4 * 2 * 512 * (2 * 64 * 4 + 8) + 4 * 4);
/// // Among these always the last 128 keys and the first 4.
/// let config = config.with_recent(Some(128)).with_sinks(Some(4));
/// ```
#[derive(Config, Debug)]
pub struct DynamicMaskCacheConfig {
    /// Number of sequences.
    pub batch: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Features per head, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Options of attention. `keep_window` is the number of slots per head; `causal` must be true.
    pub options: AttentionOptions,
    /// How many of the most recent keys are always kept. Counts toward the window. Default: none.
    pub recent: Option<usize>,
    /// How many of the first keys of a sequence rank above all others. Counts toward the window. Default: none.
    pub sinks: Option<usize>,
    /// Role of the scores. Default: they rank the keys and are added to their logits.
    pub score_role: Option<ScoreRole>,
    /// Element type of k and v: f32, f16 or bf16. Default: f32.
    #[config(default = "FloatDType::F32")]
    pub dtype: FloatDType,
}

impl DynamicMaskCacheConfig {
    /// Size of the cache on its device in bytes: `batch * kv_heads * keep_window * (2 * head_dim * size + 8)`, and 4
    /// per sequence.
    ///
    /// # Errors
    ///
    /// See [`try_init`](Self::try_init).
    pub fn bytes(&self) -> Result<usize, AttentionError> {
        Ok(self.shape()?.bytes())
    }

    pub(crate) fn shape(&self) -> Result<CacheShape, AttentionError> {
        let element = cache_element(self.dtype)?;
        let Some(window) = self.options.keep_window else {
            return Err(AttentionError::CacheWindow {
                cache: "a window of them".into(),
                options: "all".into(),
            });
        };
        let (batch, heads, dim) = (self.batch, self.kv_heads, self.head_dim);
        let rule = SelectionRule {
            window,
            recent: self.recent.unwrap_or_default(),
            sinks: self.sinks.unwrap_or_default(),
        };
        let shape = CacheShape::slots(batch, heads, rule, dim, element)?;
        let shape = shape.with_score_role(self.score_role.unwrap_or_default());
        // An empty step checks the options of attention.
        let kv = [batch, heads, 0, dim];
        shape.decode(&kv, &kv, &kv, Some(&kv[..3]), element, 0, &self.options)?;
        Ok(shape)
    }
}

/// Sizes and options of a [`PagedCache`](super::PagedCache).
///
/// ```
/// # use burn_flash_dma::{AttentionOptions, cache::PagedCacheConfig};
/// // 4 sequences of up to 8192 tokens, 2 key/value heads of 64 features. Pages of 64 tokens: 256 of them at first, and
/// // 256 more whenever they run out.
/// let config = PagedCacheConfig::new(4, 2, 64, 8192)
///     .with_pages(256)
///     .with_grow_by(256);
/// assert_eq!(config.page_len, 64);
/// ```
#[derive(Config, Debug)]
pub struct PagedCacheConfig {
    /// Number of sequences.
    pub batch: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Features per head, a multiple of 8 up to 256.
    pub head_dim: usize,
    /// Maximum number of tokens that a sequence holds: sizes the page table, in whole pages. With a window a sequence
    /// may receive more, but holds only those its next query sees, up to a page more, and those of a step.
    pub max_len: usize,
    /// Tokens per page. Default: 64. Multiples of 16 suit the matrix engines.
    #[config(default = 64)]
    pub page_len: usize,
    /// Pages allocated up front, for all sequences together. Default: 0.
    #[config(default = 0)]
    pub pages: usize,
    /// Pages by which the pool grows when it runs out; with 0 the tokens are refused instead. Default: 64. Growing
    /// copies the pool.
    #[config(default = 64)]
    pub grow_by: usize,
    /// Options of attention. `keep_window` must be `None` and `causal` true.
    #[config(default = "AttentionOptions::new()")]
    pub options: AttentionOptions,
    /// Sliding window: number of most recent keys that a query attends to, its own included. Pages that a sequence
    /// has left return to the pool: after a step of one token it has at most `(window + 2 * page_len - 3) / page_len`
    /// of them, rounded down. Default: all keys.
    pub window: Option<usize>,
    /// Gives each key a score that is added to its logits. Default: false.
    #[config(default = false)]
    pub scored: bool,
    /// Element type of k and v: f32, f16 or bf16. Default: f32.
    #[config(default = "FloatDType::F32")]
    pub dtype: FloatDType,
}

impl PagedCacheConfig {
    pub(crate) fn max_pages(&self) -> usize {
        self.max_len.div_ceil(self.page_len.max(1))
    }

    pub(crate) fn shape(&self, pages: usize) -> Result<CacheShape, AttentionError> {
        let element = cache_element(self.dtype)?;
        let (batch, heads, dim) = (self.batch, self.kv_heads, self.head_dim);
        let sizes = [pages, self.page_len, self.max_pages()];
        let mut shape = CacheShape::pages(batch, heads, sizes, dim, element)?;
        if self.scored {
            shape = shape.with_scores();
        }
        if let Some(window) = self.window {
            shape = shape.with_window(window)?;
        }
        let kv = [batch, heads, 0, dim];
        let scores = self.scored.then_some(&kv[..3]);
        shape.decode(&kv, &kv, &kv, scores, element, 0, &self.options)?;
        Ok(shape)
    }
}
