//! The attention layer over a cache.

use super::attention::DynamicMaskAttention;
use super::by_position::First;
use super::heads::{Starts, merge};
use crate::cache::{AttentionCache, DynamicMaskCacheConfig, PagedCacheConfig};
use crate::functions::sink::try_learnable_sink;
use burn::tensor::{Device, Tensor};
use flash_dma_problem::{AttentionError, ScoreRole};

/// Tokens per sequence for which [`DynamicMaskAttention::init_cache`] makes room in a page table.
const TABLE_TOKENS: usize = 1 << 20;

impl DynamicMaskAttention {
    twin! {
        /// An empty cache for `batch` sequences, on the device and in the element type of the parameters. With a
        /// window, its size is constant (recent keys and sinks included); otherwise it grows by pages, up to 2^20
        /// tokens per sequence.
        pub fn init_cache(&self, batch: usize) -> AttentionCache = Self::try_init_cache;
    }

    /// Like [`init_cache`](Self::init_cache), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::CacheNotCausal`] if the layer is not causal, [`AttentionError::CacheAlibi`] if it has ALiBi,
    /// or those of [`DynamicMaskCacheConfig::try_init`] and [`PagedCacheConfig::try_init`].
    pub fn try_init_cache(&self, batch: usize) -> Result<AttentionCache, AttentionError> {
        let weight = self.k_proj.weight.val();
        let (device, dtype): (Device, _) = (weight.device(), weight.dtype().into());
        let (heads, dim, options) = (self.n_kv_heads, self.head_dim, self.options());
        if let Some(window) = options.keep_window {
            let rule = self.rule(window);
            let config = DynamicMaskCacheConfig::new(batch, heads, dim, options)
                .with_recent(Some(rule.recent))
                .with_sinks(Some(rule.sinks))
                .with_score_role(Some(self.score_role()))
                .with_dtype(dtype);
            return Ok(config.try_init(&device)?.into());
        }
        let config = PagedCacheConfig::new(batch, heads, dim, TABLE_TOKENS)
            .with_options(options)
            .with_scored(self.score_role() == ScoreRole::RankAndBias)
            .with_dtype(dtype);
        Ok(config.try_init(&device)?.into())
    }

    twin! {
        /// The layer on new tokens (a prompt, a chunk of one, or single tokens), which it appends to the cache:
        /// `[batch, len, d_model]` to the same shape, equal to the last `len` rows of [`forward`](Self::forward) over
        /// everything. Each sequence continues at its own position, also past the end of the rotary table.
        pub fn forward_cached(&self, x: Tensor<3>, cache: &mut AttentionCache) -> Tensor<3>
            = Self::try_forward_cached;
    }

    /// Like [`forward_cached`](Self::forward_cached), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the last axis is not `d_model` or the tokens have another type than the layer, or those
    /// of [`AttentionCache::try_step`], for example if autodiff tracks the parameters. The cache is unchanged then.
    pub fn try_forward_cached(
        &self,
        x: Tensor<3>,
        cache: &mut AttentionCache,
    ) -> Result<Tensor<3>, AttentionError> {
        self.check_tokens(&x)?;
        let [q, k, v] = match self.angles_of(&x, cache) {
            Some(angles) => self.project(x.clone(), Starts::Angles(&angles))?,
            None => self.project(x.clone(), Starts::Positions(cache.lengths()))?,
        };
        let scores = match cache.has_scores() {
            true => Some(self.scores_of_next(&x, cache, &v)?),
            false => None,
        };
        let out = match &self.sink_logits {
            None => cache.try_step(q, k, v, scores)?,
            Some(logits) => {
                let (out, lse) = cache.try_step_with_lse(q, k, v, scores)?;
                try_learnable_sink(out, lse, logits.val())?.0
            }
        };
        merge(out, &self.o_proj)
    }

    fn scores_of_next(
        &self,
        x: &Tensor<3>,
        cache: &AttentionCache,
        v: &Tensor<4>,
    ) -> Result<Tensor<3>, AttentionError> {
        let learns = self.learning.by_themselves();
        self.unless_idle(x, learns, || {
            // A recorded step, or one of sequences of different lengths, reads the lengths on the device. It
            // increments them in place, as a recorded step must, only if nothing else holds them by then.
            let positions = (self.by_position.as_ref()).and_then(|_| cache.device_positions());
            let first = match &positions {
                Some(positions) => First::OnDevice(positions),
                None => First::At(cache.lengths().first().copied().unwrap_or(0)),
            };
            self.scores_from(x, first, learns, || Ok(v.clone()))
        })
    }

    /// Rotary angles of one new token per sequence, `[batch, head_dim, 2]`, gathered on the device: only if the cache
    /// [counts positions there](AttentionCache::device_positions) and the table reaches that far.
    fn angles_of(&self, x: &Tensor<3>, cache: &AttentionCache) -> Option<Tensor<3>> {
        let [batch, len, _] = x.dims();
        let table = &self.rope.as_ref()?.freq_complex;
        let [positions, _, _] = table.dims();
        let inside = cache.lengths().iter().all(|&length| length < positions);
        if len != 1 || !inside || cache.sequences() != batch || table.device() != *cache.device() {
            return None;
        }
        Some(table.clone().select(0, cache.device_positions()?))
    }
}
