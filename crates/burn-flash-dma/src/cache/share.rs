//! Sequences with a common prefix.

use super::either::{AttentionCache, of_either};
use super::paged::PagedCache;
use super::slots::DynamicMaskCache;
use super::tokens::check_sequences;
use flash_dma_problem::AttentionError;

impl DynamicMaskCache {
    twin! {
        /// Adds a copy of a sequence and returns its number, which is the greatest. Copies the cache: slots are
        /// overwritten where keys are evicted, so they are not shared.
        pub fn fork(&mut self, sequence: usize) -> usize = Self::try_fork;
    }

    /// Like [`fork`](Self::fork), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`try_reorder`](Self::try_reorder).
    pub fn try_fork(&mut self, sequence: usize) -> Result<usize, AttentionError> {
        let new = self.sequences();
        self.try_reorder(&with_another(new, sequence))?;
        Ok(new)
    }
}

impl PagedCache {
    twin! {
        /// Adds a copy of a sequence and returns its number, which is the greatest. Nothing is copied until one of
        /// the two receives tokens; then only the last page is, unless it is full.
        ///
        /// ```
        /// # #[cfg(feature = "flex")] {
        /// # use burn::tensor::{Device, Tensor};
        /// # use burn_flash_dma::cache::PagedCacheConfig;
        /// let device = Device::flex();
        /// let mut cache = PagedCacheConfig::new(1, 2, 8, 256).with_page_len(16).init(&device);
        /// let kv = |tokens| Tensor::<4>::ones([1, 2, tokens, 8], &device);
        /// cache.append(kv(40), kv(40), None);
        /// assert_eq!((cache.fork(0), cache.used_pages()), (1, 3));
        /// // Each of the two sequences writes to a page of its own; two pages are shared.
        /// let kv = || Tensor::<4>::ones([2, 2, 1, 8], &device);
        /// let _ = cache.step(kv(), kv(), kv(), None);
        /// assert_eq!(cache.used_pages(), 4);
        /// # }
        /// ```
        pub fn fork(&mut self, sequence: usize) -> usize = Self::try_fork;
    }

    /// Like [`fork`](Self::fork), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`try_reorder`](Self::try_reorder).
    pub fn try_fork(&mut self, sequence: usize) -> Result<usize, AttentionError> {
        let new = self.sequences();
        self.try_reorder(&with_another(new, sequence))?;
        Ok(new)
    }

    twin! {
        /// Replaces sequence `into` by the first `tokens` tokens of sequence `from`, sharing its pages: for requests
        /// with a common prefix. The old contents of `into` are dropped. A sequence may be replaced by its own
        /// prefix.
        pub fn share_prefix(&mut self, from: usize, into: usize, tokens: usize)
            = Self::try_share_prefix;
    }

    /// Like [`share_prefix`](Self::share_prefix), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Sequence`] if there is no such sequence; [`AttentionError::Prefix`] if `from` has received
    /// fewer tokens, or its window has left pages that the next query of the prefix would see;
    /// [`AttentionError::BlockTable`] if the table is external; [`AttentionError::TokensWait`] if tokens wait. The
    /// cache is unchanged then.
    pub fn try_share_prefix(
        &mut self,
        from: usize,
        into: usize,
        tokens: usize,
    ) -> Result<(), AttentionError> {
        self.hold.check()?;
        self.pool.check_own()?;
        check_sequences(&[from, into], self.config.batch)?;
        let (given, dropped) = (self.lengths[from], self.dropped[from]);
        // The query after the prefix sees `window - 1` of its tokens.
        let least = match (dropped, self.config.window) {
            (1.., Some(window)) => dropped + window - 1,
            _ => 0,
        };
        if !(least..=given).contains(&tokens) {
            return Err(AttentionError::Prefix {
                sequence: from,
                tokens,
                least,
                most: given,
            });
        }
        let pages = (tokens - dropped).div_ceil(self.config.page_len);
        let shared = self.pool.table[from][..pages].to_vec();
        self.pool.replace(into, shared);
        (self.lengths[into], self.dropped[into]) = (tokens, dropped);
        self.upload();
        Ok(())
    }
}

impl AttentionCache {
    twin! {
        /// Adds a copy of a sequence and returns its number: see [`PagedCache::fork`] and [`DynamicMaskCache::fork`].
        pub fn fork(&mut self, sequence: usize) -> usize = Self::try_fork;
    }

    /// Like [`fork`](Self::fork), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`try_reorder`](Self::try_reorder).
    pub fn try_fork(&mut self, sequence: usize) -> Result<usize, AttentionError> {
        of_either!(self, try_fork(sequence))
    }
}

/// All sequences, and one of them again.
fn with_another(batch: usize, sequence: usize) -> Vec<usize> {
    (0..batch).chain([sequence]).collect()
}
