//! A cache of keys and values for decoding, and the checked operations on it.
//!
//! A cache of **slots** holds, for every sequence and kv head, the keys that a [`SelectionRule`] keeps; an evicted key
//! never returns, so memory is constant for any context. A cache of **pages** holds every key, in blocks that a table
//! assigns to the sequences: dense attention.

use crate::problem::{
    MAX_BYTES, MAX_LEN, check_head_dim, check_limit, check_options, check_shape, rank,
    size_in_bytes,
};
use crate::{
    AttentionError, AttentionOptions, ElementType, EngineChoice, Obstacle, PassKind, ScoreRole,
    SelectionRule, TensorName,
};

/// The most tokens per sequence in one decode step of the kernels.
pub const MAX_DECODE_TOKENS: usize = 16;

/// The storage of a cache's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Storage {
    /// `k`, `v` `[batch, kv_heads, window, head_dim]`; `score` (f32) and `position` (i32) `[batch, kv_heads, window]`;
    /// `seen` `[batch]` (i32), the tokens each sequence has been given.
    ///
    /// An empty slot has score −∞ and position −1. A recent token of score −∞ has a slot, too, because it takes its
    /// place; it is not attended to, and counts as an empty slot once it is no longer recent. The rows of a slot of
    /// score −∞ are never used. The slots of a head are unordered.
    Slots {
        /// The rule for the keys that a kv head keeps. A sequence is one document.
        rule: SelectionRule,
        /// The role of the keys' scores.
        role: ScoreRole,
    },
    /// `k`, `v` `[pages, kv_heads, page_len, head_dim]`; if `scored`, `scores` (f32) `[pages, kv_heads, page_len]`,
    /// each added to its key's logits, −∞ for a key that is never attended to; `table` `[batch, max_pages]` (i32), the
    /// pages of each sequence in order; `lengths` `[batch]` (i32), the tokens each sequence holds.
    Pages {
        /// Number of pages, for all sequences.
        pages: usize,
        /// Tokens per page.
        page_len: usize,
        /// The most pages of a sequence.
        max_pages: usize,
        /// True if keys carry scores.
        scored: bool,
        /// How many of the last keys a query attends to, including its own; all with `None`.
        window: Option<usize>,
    },
}

/// The sizes of one valid cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CacheShape {
    /// Sequences.
    pub batch: usize,
    /// Heads of `k` and `v`.
    pub kv_heads: usize,
    /// Elements per row, a multiple of 8 up to [`MAX_HEAD_DIM`](crate::MAX_HEAD_DIM).
    pub head_dim: usize,
    /// Element type of `k` and `v`.
    pub element: ElementType,
    /// The storage of the rows.
    pub storage: Storage,
}

/// Appending tokens to a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AppendProblem {
    /// The cache.
    pub cache: CacheShape,
    /// New tokens per sequence; 0 appends nothing.
    pub tokens: usize,
}

/// When the tokens of a decode step are appended to its cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Appending {
    /// By the step.
    #[default]
    Now,
    /// Not by the step, which leaves the cache unchanged: for guesses, whose accepted tokens the caller appends later.
    Later,
}

/// A decode step: new tokens attend to the keys of the cache and to each other, and are appended.
///
/// Query `t` of the step sees exactly what it would if the tokens were decoded one at a time: the keys of the cache and
/// the new tokens up to and including its own or, with a cache of slots, those of them that the rule keeps at its
/// position.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct DecodeProblem {
    /// The tokens to append and the cache. `tokens` is also the number of queries.
    pub append: AppendProblem,
    /// Heads of `q` and `out`, a multiple of the cache's `kv_heads`.
    pub q_heads: usize,
    /// Factor on `q . k`.
    pub scale: f32,
    /// Cap of the scaled product.
    pub softcap: Option<f32>,
    /// When the tokens are appended; by the step, unless [`with_appending`](Self::with_appending) changes it.
    pub appending: Appending,
}

impl CacheShape {
    /// Creates a cache with one slot per kv head for each key that the rule keeps. `rule` is a number of keys, or a
    /// [`SelectionRule`] with recent keys and sinks.
    ///
    /// # Errors
    ///
    /// [`AttentionError::ZeroWindow`], [`AttentionError::WindowParts`], [`AttentionError::HeadDim`],
    /// [`AttentionError::HeadRatio`] for no heads, or [`AttentionError::TooLarge`].
    pub fn slots(
        batch: usize,
        kv_heads: usize,
        rule: impl Into<SelectionRule>,
        head_dim: usize,
        element: ElementType,
    ) -> Result<Self, AttentionError> {
        let rule = rule.into();
        rule.check()?;
        let role = ScoreRole::default();
        Self {
            batch,
            kv_heads,
            head_dim,
            element,
            storage: Storage::Slots { rule, role },
        }
        .checked()
    }

    /// Creates a cache of `pages` pages of `page_len` tokens; each sequence may have `max_pages` of them.
    ///
    /// # Errors
    ///
    /// [`AttentionError::EmptyPages`] if a page or a row of the table has no room, otherwise those of
    /// [`slots`](Self::slots).
    pub fn pages(
        batch: usize,
        kv_heads: usize,
        [pages, page_len, max_pages]: [usize; 3],
        head_dim: usize,
        element: ElementType,
    ) -> Result<Self, AttentionError> {
        if page_len == 0 || max_pages == 0 {
            return Err(AttentionError::EmptyPages);
        }
        Self {
            batch,
            kv_heads,
            head_dim,
            element,
            storage: Storage::Pages {
                pages,
                page_len,
                max_pages,
                scored: false,
                window: None,
            },
        }
        .checked()
    }

    /// Adds a score per key to pages, without a window: a key bias. Slots always have scores.
    #[must_use]
    pub fn with_scores(mut self) -> Self {
        if let Storage::Pages { scored, .. } = &mut self.storage {
            *scored = true;
        }
        self
    }

    /// Sets the role of the scores in slots. Pages, which rank nothing, are unchanged.
    #[must_use]
    pub fn with_score_role(mut self, of_scores: ScoreRole) -> Self {
        if let Storage::Slots { role, .. } = &mut self.storage {
            *role = of_scores;
        }
        self
    }

    /// Changes the number of sequences.
    ///
    /// # Errors
    ///
    /// [`AttentionError::TooLarge`] if there are more than can be addressed.
    pub fn with_batch(self, batch: usize) -> Result<Self, AttentionError> {
        Self { batch, ..self }.checked()
    }

    /// Limits each query to the last `keys` keys of a cache of pages, its own included. Older ones may be dropped, by
    /// whole pages, from the tables and the lengths alike. Slots have a window of their own and are unchanged.
    ///
    /// # Errors
    ///
    /// [`AttentionError::ZeroWindow`].
    pub fn with_window(mut self, keys: usize) -> Result<Self, AttentionError> {
        if keys == 0 {
            return Err(AttentionError::ZeroWindow);
        }
        if let Storage::Pages { window, .. } = &mut self.storage {
            *window = Some(keys);
        }
        Ok(self)
    }

    fn checked(self) -> Result<Self, AttentionError> {
        if self.kv_heads == 0 {
            let (q_heads, kv_heads) = (0, 0);
            return Err(AttentionError::HeadRatio { q_heads, kv_heads });
        }
        check_head_dim(self.head_dim)?;
        match self.storage {
            Storage::Slots { rule, .. } => {
                check_limit("the number of slots", rule.window, MAX_LEN)?;
            }
            Storage::Pages {
                pages,
                page_len,
                max_pages,
                ..
            } => {
                let tokens = page_len.saturating_mul(max_pages);
                check_limit(
                    "the number of tokens of a page table's row",
                    tokens,
                    MAX_LEN,
                )?;
                check_limit("the number of pages", pages, MAX_LEN)?;
                let entries = self.batch.saturating_mul(max_pages);
                check_limit("the size of the page table", entries, MAX_LEN)?;
            }
        }
        // An empty batch is refused too if one sequence would be too large.
        let bytes = size_in_bytes(self.element, self.kv_shape().map(|n| n.max(1)));
        check_limit("the size of the cached k in bytes", bytes, MAX_BYTES)?;
        Ok(self)
    }

    /// Shape of the cached `k` and `v`.
    #[must_use]
    pub fn kv_shape(&self) -> [usize; 4] {
        match self.storage {
            Storage::Slots { rule, .. } => [self.batch, self.kv_heads, rule.window, self.head_dim],
            Storage::Pages {
                pages, page_len, ..
            } => [pages, self.kv_heads, page_len, self.head_dim],
        }
    }

    /// Number of keys that a kv head of a sequence has room for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        match self.storage {
            Storage::Slots { rule, .. } => rule.window,
            Storage::Pages {
                page_len,
                max_pages,
                ..
            } => page_len * max_pages,
        }
    }

    /// The selection rule of slots; `None` for pages, which keep all keys.
    #[must_use]
    pub fn rule(&self) -> Option<SelectionRule> {
        match self.storage {
            Storage::Slots { rule, .. } => Some(rule),
            Storage::Pages { .. } => None,
        }
    }

    /// The window of a cache of pages: how many of the last keys a query attends to. `None` if there is none.
    #[must_use]
    pub fn page_window(&self) -> Option<usize> {
        match self.storage {
            Storage::Slots { .. } => None,
            Storage::Pages { window, .. } => window,
        }
    }

    /// True if the first keys rank above all others. A chunk's keys then have ranks other than the scores added to
    /// logits.
    #[must_use]
    pub fn has_sinks(&self) -> bool {
        self.rule().is_some_and(|rule| rule.sinks > 0)
    }

    /// True if keys carry scores: always in slots, in pages if requested.
    #[must_use]
    pub fn has_scores(&self) -> bool {
        !matches!(self.storage, Storage::Pages { scored: false, .. })
    }

    /// The role of the keys' scores, if they carry any. In pages, which rank nothing, they are added to the logits.
    #[must_use]
    pub fn score_role(&self) -> ScoreRole {
        match self.storage {
            Storage::Slots { role, .. } => role,
            Storage::Pages { .. } => ScoreRole::RankAndBias,
        }
    }

    /// True if the keys carry scores that are added to their logits.
    #[must_use]
    pub fn adds_scores(&self) -> bool {
        self.has_scores() && self.score_role() == ScoreRole::RankAndBias
    }

    /// Bytes of all tensors of the cache.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let rows = 2 * size_in_bytes(self.element, self.kv_shape());
        rows + match self.storage {
            Storage::Slots { rule, .. } => {
                8 * self.batch * self.kv_heads * rule.window + 4 * self.batch
            }
            Storage::Pages {
                pages,
                page_len,
                max_pages,
                scored,
                ..
            } => {
                let scores = 4 * pages * self.kv_heads * page_len * usize::from(scored);
                scores + 4 * self.batch * (max_pages + 1)
            }
        }
    }

    /// Checks tokens to append: `k` and `v` `[batch, kv_heads, tokens, head_dim]` of the cache's element type, and
    /// `scores` `[batch, kv_heads, tokens]`, given exactly if its keys carry scores.
    ///
    /// `held` is the number of tokens that the sequences have been given before; if they differ, the greatest.
    ///
    /// # Errors
    ///
    /// [`AttentionError::ElementType`] if `element` is not the cache's, [`AttentionError::Rank`] or
    /// [`AttentionError::Shape`] if a shape does not fit (another batch is axis 0), [`AttentionError::CacheScores`],
    /// [`AttentionError::Positions`] if positions would exceed 32 bits, or [`AttentionError::PagesFull`] if the page
    /// table has no room.
    pub fn append(
        &self,
        k: &[usize],
        v: &[usize],
        scores: Option<&[usize]>,
        element: ElementType,
        held: usize,
    ) -> Result<AppendProblem, AttentionError> {
        if element != self.element {
            let key = TensorName::Key;
            return Err(AttentionError::element_type(key, self.element, element));
        }
        let [_, _, tokens, _] = rank(TensorName::Key, k)?;
        let shape = [self.batch, self.kv_heads, tokens, self.head_dim];
        check_shape(TensorName::Key, k, &shape)?;
        check_shape(TensorName::Value, v, &shape)?;
        match scores {
            Some(scores) if self.has_scores() => {
                check_shape(TensorName::Scores, scores, &shape[..3])?;
            }
            None if !self.has_scores() => {}
            _ => return Err(AttentionError::CacheScores),
        }
        if let Storage::Pages { .. } = self.storage
            && held.saturating_add(tokens) > self.capacity()
        {
            return Err(AttentionError::PagesFull {
                held,
                tokens,
                capacity: self.capacity(),
            });
        }
        if held.saturating_add(tokens) > MAX_LEN {
            return Err(AttentionError::Positions {
                held,
                tokens,
                limit: MAX_LEN,
            });
        }
        Ok(AppendProblem {
            cache: *self,
            tokens,
        })
    }

    /// Checks a decode step: `q` is `[batch, q_heads, tokens, head_dim]`, the rest is as in [`append`](Self::append).
    ///
    /// # Errors
    ///
    /// The errors of [`append`](Self::append); [`AttentionError::HeadRatio`]; [`AttentionError::CacheWindow`] if
    /// `options` keep another window than the cache has slots, or any with pages; [`AttentionError::CacheNotCausal`];
    /// [`AttentionError::CacheDropout`]; [`AttentionError::CacheAlibi`]; and the errors of the scale and the softcap.
    pub fn decode(
        &self,
        q: &[usize],
        k: &[usize],
        v: &[usize],
        scores: Option<&[usize]>,
        element: ElementType,
        held: usize,
        options: &AttentionOptions,
    ) -> Result<DecodeProblem, AttentionError> {
        let [_, q_heads, _, _] = rank(TensorName::Query, q)?;
        if q_heads == 0 || !q_heads.is_multiple_of(self.kv_heads) {
            let kv_heads = self.kv_heads;
            return Err(AttentionError::HeadRatio { q_heads, kv_heads });
        }
        let append = self.append(k, v, scores, element, held)?;
        let shape = [self.batch, q_heads, append.tokens, self.head_dim];
        check_shape(TensorName::Query, q, &shape)?;
        self.check_window(options.keep_window)?;
        if !options.causal {
            return Err(AttentionError::CacheNotCausal);
        }
        if options.dropout.is_some() {
            return Err(AttentionError::CacheDropout);
        }
        if options.alibi.is_some() {
            return Err(AttentionError::CacheAlibi);
        }
        if let EngineChoice::Only(engine) = options.engine {
            let (pass, obstacle) = (PassKind::Decode, Obstacle::Cache);
            return Err(AttentionError::Engine {
                engine,
                pass,
                obstacle,
            });
        }
        let scale = check_options(options, self.head_dim)?;
        Ok(DecodeProblem {
            append,
            q_heads,
            scale,
            softcap: options.softcap,
            appending: Appending::Now,
        })
    }

    /// Checks the keep window of a model against the cache.
    ///
    /// # Errors
    ///
    /// [`AttentionError::CacheWindow`] if it is not the number of slots, or if there is one and the cache has pages.
    pub fn check_window(&self, keep_window: Option<usize>) -> Result<(), AttentionError> {
        let slots = self.rule().map(|rule| rule.window);
        if keep_window == slots {
            return Ok(());
        }
        let words = |window: Option<usize>| window.map_or("all".into(), |w| w.to_string());
        Err(AttentionError::CacheWindow {
            cache: words(slots),
            options: words(keep_window),
        })
    }
}

impl AppendProblem {
    /// Shape of the new `k` and `v`.
    #[must_use]
    pub fn kv_shape(&self) -> [usize; 4] {
        let cache = self.cache;
        [cache.batch, cache.kv_heads, self.tokens, cache.head_dim]
    }
}

impl DecodeProblem {
    /// Sets when the step's tokens are appended.
    #[must_use]
    pub fn with_appending(self, appending: Appending) -> Self {
        Self { appending, ..self }
    }

    /// Shape of `q` and `out`.
    #[must_use]
    pub fn q_shape(&self) -> [usize; 4] {
        let AppendProblem { cache, tokens } = self.append;
        [cache.batch, self.q_heads, tokens, cache.head_dim]
    }

    /// Shape of the LSE.
    #[must_use]
    pub fn lse_shape(&self) -> [usize; 3] {
        let [batch, heads, tokens, _] = self.q_shape();
        [batch, heads, tokens]
    }

    /// Checks the number of tokens against [`MAX_DECODE_TOKENS`], for engines that have such a limit.
    ///
    /// # Errors
    ///
    /// [`AttentionError::TooLarge`].
    pub fn check_tokens(&self) -> Result<(), AttentionError> {
        let what = "the number of tokens of a decode step";
        check_limit(what, self.append.tokens, MAX_DECODE_TOKENS)
    }

    /// Number of query heads that share a kv head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.q_heads / self.append.cache.kv_heads
    }

    /// Bytes of a step if every live key and value, query and output is moved once; `keys` is the number of keys per kv
    /// head.
    #[must_use]
    pub fn bytes(&self, keys: usize) -> u128 {
        let AppendProblem { cache, tokens } = self.append;
        let size = cache.element.size() * cache.head_dim;
        let key = 2 * size + if cache.has_scores() { 4 } else { 0 };
        // New rows are read, and also written if they are appended.
        let moves = match self.appending {
            Appending::Now => 2,
            Appending::Later => 1,
        };
        let rows = cache.batch * cache.kv_heads * (keys + moves * tokens) * key;
        (rows + cache.batch * self.q_heads * tokens * (2 * size + 4)) as u128
    }

    /// Floating-point operations of a step over `keys` keys per kv head: two products of `head_dim` per pair.
    #[must_use]
    pub fn flops(&self, keys: usize) -> u128 {
        let [batch, heads, tokens, head_dim] = self.q_shape();
        4 * (batch * heads * tokens * head_dim) as u128 * keys as u128
    }
}

#[cfg(test)]
mod tests;
