//! Reordering, emptying and joining of sequences.

use super::config::PagedCacheConfig;
use super::paged::PagedCache;
use super::pool::PagePool;
use super::slots::{DynamicMaskCache, State};
use super::tokens::{Rows, check_sequences};
use crate::fallback::tensors::ints;
use burn::tensor::{DType, Tensor, s};
use flash_dma_problem::AttentionError;

impl DynamicMaskCache {
    twin! {
        /// Replaces sequence `i` by sequence `indices[i]`: a permutation, or the surviving beams. There may be fewer
        /// or more indices than sequences. Copies the cache.
        pub fn reorder(&mut self, indices: &[usize]) = Self::try_reorder;
    }

    /// Like [`reorder`](Self::reorder), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Sequence`] if an index has no sequence; [`AttentionError::TooLarge`] for more sequences than
    /// can be addressed; [`AttentionError::TokensWait`] if tokens wait. The cache is unchanged then.
    pub fn try_reorder(&mut self, indices: &[usize]) -> Result<(), AttentionError> {
        self.hold.check()?;
        check_sequences(indices, self.shape.batch)?;
        let shape = self.shape.with_batch(indices.len())?;
        let index = indices.iter().map(|&i| i as i32).collect();
        let index = ints(index, [indices.len()], &self.device);
        let state = self.state.take().expect("no operation has the cache");
        self.state = Some(State {
            k: state.k.select(0, index.clone()),
            v: state.v.select(0, index.clone()),
            score: state.score.select(0, index.clone()),
            position: state.position.select(0, index.clone()),
            seen: state.seen.select(0, index),
        });
        self.shape = shape;
        self.lengths = indices.iter().map(|&i| self.lengths[i]).collect();
        Ok(())
    }

    twin! {
        /// Empties one sequence: its next token is at position 0, the start of a new document.
        pub fn reset(&mut self, sequence: usize) = Self::try_reset;
    }

    /// Like [`reset`](Self::reset), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Sequence`] if there is no such sequence, or [`AttentionError::TokensWait`] if tokens wait. The
    /// cache is unchanged then.
    pub fn try_reset(&mut self, sequence: usize) -> Result<(), AttentionError> {
        self.hold.check()?;
        check_sequences(&[sequence], self.shape.batch)?;
        let [_, heads, window, _] = self.shape.kv_shape();
        let one = [sequence..sequence + 1, 0..heads, 0..window];
        let rows = [1, heads, window];
        let state = self.state.take().expect("no operation has the cache");
        let score = Tensor::full(rows, f32::NEG_INFINITY, (&self.device, DType::F32));
        let position = Tensor::full(rows, -1, (&self.device, DType::I32));
        let seen = Tensor::zeros([1], (&self.device, DType::I32));
        self.state = Some(State {
            score: state.score.slice_assign(one.clone(), score),
            position: state.position.slice_assign(one, position),
            seen: state.seen.slice_assign(s![sequence..sequence + 1], seen),
            ..state
        });
        self.lengths[sequence] = 0;
        Ok(())
    }

    twin! {
        /// Joins the sequences of several caches, in the order given: prompts of different lengths may be read in
        /// groups and continued together. The configurations must be equal except for the number of sequences. Copies
        /// the caches. The joined cache does not hold.
        pub fn cat(caches: Vec<Self>) -> Self = Self::try_cat;
    }

    /// Like [`cat`](Self::cat), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::NoCaches`]; [`AttentionError::JoinedCaches`] if one differs from the first in its sizes,
    /// options, role of scores or device; [`AttentionError::TokensWait`] if tokens wait in one;
    /// [`AttentionError::TooLarge`] for more sequences than can be addressed.
    pub fn try_cat(caches: Vec<Self>) -> Result<Self, AttentionError> {
        let first = caches.first().ok_or(AttentionError::NoCaches)?;
        let sizes = |cache: &Self| {
            let of = &cache.shape;
            (of.kv_heads, of.head_dim, of.element, of.rule())
        };
        let role = |cache: &Self| cache.shape.score_role();
        for (index, cache) in caches.iter().enumerate() {
            cache.hold.check()?;
            let equal = [
                (sizes(cache) == sizes(first), "sizes"),
                (cache.options == first.options, "options"),
                (role(cache) == role(first), "roles of scores"),
                (cache.device == first.device, "devices"),
            ];
            check_equal(index, &equal)?;
        }
        let shape = (first.shape).with_batch(caches.iter().map(Self::sequences).sum())?;
        let states = || caches.iter().map(Self::state);
        let state = State {
            k: Tensor::cat(states().map(|state| state.k.clone()).collect(), 0),
            v: Tensor::cat(states().map(|state| state.v.clone()).collect(), 0),
            score: Tensor::cat(states().map(|state| state.score.clone()).collect(), 0),
            position: Tensor::cat(states().map(|state| state.position.clone()).collect(), 0),
            seen: Tensor::cat(states().map(|state| state.seen.clone()).collect(), 0),
        };
        let lengths = caches.iter().flat_map(|cache| cache.lengths.clone());
        Ok(first.restored(shape, state, lengths.collect()))
    }
}

impl PagedCache {
    twin! {
        /// Replaces sequence `i` by sequence `indices[i]`. There may be fewer or more indices than sequences. Only
        /// the table changes: sequences of a repeated index share pages until one writes to them.
        pub fn reorder(&mut self, indices: &[usize]) = Self::try_reorder;
    }

    /// Like [`reorder`](Self::reorder), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Sequence`] if an index has no sequence; [`AttentionError::BlockTable`] if the table is
    /// external; [`AttentionError::TokensWait`] if tokens wait. The cache is unchanged then.
    pub fn try_reorder(&mut self, indices: &[usize]) -> Result<(), AttentionError> {
        self.hold.check()?;
        self.pool.check_own()?;
        check_sequences(indices, self.config.batch)?;
        let config = PagedCacheConfig {
            batch: indices.len(),
            ..self.config.clone()
        };
        self.shape = config.shape(self.pool.pages())?;
        self.config = config;
        self.pool.reorder(indices);
        self.lengths = indices.iter().map(|&i| self.lengths[i]).collect();
        self.dropped = indices.iter().map(|&i| self.dropped[i]).collect();
        self.upload();
        Ok(())
    }

    twin! {
        /// Empties one sequence and returns its unshared pages to the pool.
        pub fn reset(&mut self, sequence: usize) = Self::try_reset;
    }

    /// Like [`reset`](Self::reset), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Sequence`] if there is no such sequence; [`AttentionError::BlockTable`] if the table is
    /// external; [`AttentionError::TokensWait`] if tokens wait. The cache is unchanged then.
    pub fn try_reset(&mut self, sequence: usize) -> Result<(), AttentionError> {
        self.hold.check()?;
        self.pool.check_own()?;
        check_sequences(&[sequence], self.config.batch)?;
        self.pool.replace(sequence, Vec::new());
        (self.lengths[sequence], self.dropped[sequence]) = (0, 0);
        self.upload();
        Ok(())
    }

    twin! {
        /// Joins the sequences of several caches, in the order given: see [`DynamicMaskCache::cat`]. The joined pool
        /// has all their pages; configurations may also differ in `pages`.
        pub fn cat(caches: Vec<Self>) -> Self = Self::try_cat;
    }

    /// Like [`cat`](Self::cat), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`DynamicMaskCache::try_cat`], and [`AttentionError::BlockTable`] if a table is external.
    pub fn try_cat(caches: Vec<Self>) -> Result<Self, AttentionError> {
        let first = caches.first().ok_or(AttentionError::NoCaches)?;
        let sizes = |cache: &Self| {
            let of = &cache.config;
            let heads = [of.kv_heads, of.head_dim];
            let pages = [of.max_len, of.page_len, of.grow_by];
            (heads, of.dtype, pages, of.window, of.scored)
        };
        for (index, cache) in caches.iter().enumerate() {
            cache.hold.check()?;
            cache.pool.check_own()?;
            let equal = [
                (sizes(cache) == sizes(first), "sizes"),
                (cache.config.options == first.config.options, "options"),
                (cache.device == first.device, "devices"),
            ];
            check_equal(index, &equal)?;
        }
        let pools: Vec<&PagePool> = caches.iter().map(|cache| &cache.pool).collect();
        let pool = PagePool::joined(&pools);
        let config = PagedCacheConfig {
            batch: caches.iter().map(Self::sequences).sum(),
            ..first.config.clone()
        };
        let shape = config.shape(pool.pages())?;
        let rows = || caches.iter().map(|cache| &cache.state().rows);
        let scores: Option<Vec<Tensor<3>>> = rows().map(|rows| rows.scores.clone()).collect();
        let rows = Rows {
            k: Tensor::cat(rows().map(|rows| rows.k.clone()).collect(), 0),
            v: Tensor::cat(rows().map(|rows| rows.v.clone()).collect(), 0),
            scores: scores.map(|scores| Tensor::cat(scores, 0)),
        };
        let lengths = caches.iter().flat_map(|cache| cache.lengths.clone());
        let dropped = caches.iter().flat_map(|cache| cache.dropped.clone());
        let tokens = [lengths.collect(), dropped.collect()];
        Ok(Self::restored(
            config,
            shape,
            &first.device,
            rows,
            pool,
            tokens,
        ))
    }
}

fn check_equal(index: usize, equal: &[(bool, &'static str)]) -> Result<(), AttentionError> {
    match equal.iter().find(|(equal, _)| !equal) {
        Some(&(_, what)) => Err(AttentionError::JoinedCaches { index, what }),
        None => Ok(()),
    }
}
