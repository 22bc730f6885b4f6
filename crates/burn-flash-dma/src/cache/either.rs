//! The cache of a layer, of either kind.

use super::paged::PagedCache;
use super::slots::DynamicMaskCache;
use burn::tensor::{Device, Tensor};
use flash_dma_problem::AttentionError;

/// Cache of one attention layer: of constant size with a window, or of pages if every key is kept.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn::tensor::{Device, Tensor};
/// # use burn_flash_dma::{AttentionOptions, cache::*};
/// let device = Device::flex();
/// let options = AttentionOptions::new().with_keep_window(16);
/// let mut layers: Vec<AttentionCache> = vec![
///     DynamicMaskCacheConfig::new(1, 2, 8, options).init(&device).into(),
///     PagedCacheConfig::new(1, 2, 8, 1024).init(&device).into(),
/// ];
/// let kv = || Tensor::<4>::ones([1, 2, 1, 8], &device);
/// let scores = Tensor::<3>::ones([1, 2, 1], &device);
/// let _ = layers[0].step(kv(), kv(), kv(), Some(scores));
/// let _ = layers[1].step(kv(), kv(), kv(), None);
/// assert!(layers.iter().all(|layer| layer.lengths() == [1]));
/// # }
/// ```
#[derive(Clone, Debug)]
pub enum AttentionCache {
    /// Keeps the best keys of each head.
    DynamicMask(DynamicMaskCache),
    /// Keeps every key.
    Paged(PagedCache),
}

/// Calls a method on either kind of cache.
macro_rules! of_either {
    ($cache:expr, $method:ident($($argument:expr),*)) => {
        match $cache {
            AttentionCache::DynamicMask(cache) => cache.$method($($argument),*),
            AttentionCache::Paged(cache) => cache.$method($($argument),*),
        }
    };
}
pub(super) use of_either;

impl From<DynamicMaskCache> for AttentionCache {
    fn from(cache: DynamicMaskCache) -> Self {
        Self::DynamicMask(cache)
    }
}

impl From<PagedCache> for AttentionCache {
    fn from(cache: PagedCache) -> Self {
        Self::Paged(cache)
    }
}

impl AttentionCache {
    twin! {
        /// Attends from new tokens to the cache and to each other, and appends them: see [`DynamicMaskCache::step`].
        /// `scores` must be given exactly if the cache has scores.
        pub fn step(
            &mut self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, scores: Option<Tensor<3>>
        ) -> Tensor<4> = Self::try_step;
    }

    /// Like [`step`](Self::step), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`DynamicMaskCache::try_step`] and [`PagedCache::try_step`].
    pub fn try_step(
        &mut self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Option<Tensor<3>>,
    ) -> Result<Tensor<4>, AttentionError> {
        Ok(self.try_step_with_lse(q, k, v, scores)?.0)
    }

    /// [`try_step`](Self::try_step) that also returns the LSE of the logits: `[batch, q_heads, tokens]`, f32.
    ///
    /// # Errors
    ///
    /// See [`try_step`](Self::try_step).
    pub fn try_step_with_lse(
        &mut self,
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Option<Tensor<3>>,
    ) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        match self {
            Self::DynamicMask(cache) => {
                let scores = scores.ok_or(AttentionError::CacheScores)?;
                cache.try_step_with_lse(q, k, v, scores)
            }
            Self::Paged(cache) => cache.try_step_with_lse(q, k, v, scores),
        }
    }

    /// True if each key has a score.
    #[must_use]
    pub fn has_scores(&self) -> bool {
        match self {
            Self::DynamicMask(_) => true,
            Self::Paged(cache) => cache.config().scored,
        }
    }

    /// Number of tokens each sequence has received, which is the position of its next token.
    #[must_use]
    pub fn lengths(&self) -> &[usize] {
        of_either!(self, lengths())
    }

    twin! {
        /// Replaces sequence `i` by sequence `indices[i]`: see [`DynamicMaskCache::reorder`].
        pub fn reorder(&mut self, indices: &[usize]) = Self::try_reorder;
    }

    /// Like [`reorder`](Self::reorder), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`DynamicMaskCache::try_reorder`] and [`PagedCache::try_reorder`].
    pub fn try_reorder(&mut self, indices: &[usize]) -> Result<(), AttentionError> {
        of_either!(self, try_reorder(indices))
    }

    twin! {
        /// Empties one sequence.
        pub fn reset(&mut self, sequence: usize) = Self::try_reset;
    }

    /// Like [`reset`](Self::reset), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`DynamicMaskCache::try_reset`].
    pub fn try_reset(&mut self, sequence: usize) -> Result<(), AttentionError> {
        of_either!(self, try_reset(sequence))
    }

    twin! {
        /// Joins the sequences of several caches, in the order given: see [`DynamicMaskCache::cat`].
        pub fn cat(caches: Vec<Self>) -> Self = Self::try_cat;
    }

    /// Like [`cat`](Self::cat), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`DynamicMaskCache::try_cat`], and [`AttentionError::JoinedCaches`] if caches of slots and of pages
    /// are mixed.
    pub fn try_cat(caches: Vec<Self>) -> Result<Self, AttentionError> {
        let (mut slots, mut pages) = (Vec::new(), Vec::new());
        for (index, cache) in caches.into_iter().enumerate() {
            match cache {
                Self::DynamicMask(cache) => slots.push(cache),
                Self::Paged(cache) => pages.push(cache),
            }
            if !slots.is_empty() && !pages.is_empty() {
                let what = "kinds";
                return Err(AttentionError::JoinedCaches { index, what });
            }
        }
        match pages.is_empty() {
            true => Ok(DynamicMaskCache::try_cat(slots)?.into()),
            false => Ok(PagedCache::try_cat(pages)?.into()),
        }
    }

    /// Number of sequences.
    #[must_use]
    pub fn sequences(&self) -> usize {
        of_either!(self, sequences())
    }

    /// Size on the device in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        of_either!(self, bytes())
    }

    /// Device of the tensors.
    #[must_use]
    pub fn device(&self) -> &Device {
        of_either!(self, device())
    }
}

impl AttentionCache {
    twin! {
        /// Holds back the tokens of the next step: see [`DynamicMaskCache::hold`].
        pub fn hold(&mut self) = Self::try_hold;
    }

    /// Like [`hold`](Self::hold), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::TokensWait`] if tokens wait already.
    pub fn try_hold(&mut self) -> Result<(), AttentionError> {
        of_either!(self, try_hold())
    }

    twin! {
        /// Appends the first `count` waiting tokens, drops the others and ends holding: see
        /// [`DynamicMaskCache::accept`].
        pub fn accept(&mut self, count: usize) = Self::try_accept;
    }

    /// Like [`accept`](Self::accept), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`DynamicMaskCache::try_accept`].
    pub fn try_accept(&mut self, count: usize) -> Result<(), AttentionError> {
        of_either!(self, try_accept(count))
    }

    /// Number of tokens per sequence that wait to be [accepted](Self::accept).
    #[must_use]
    pub fn waiting(&self) -> usize {
        of_either!(self, waiting())
    }
}
