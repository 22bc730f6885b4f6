//! The keys of each query's document, as ranges.

use super::polarity::AttentionMask;
use super::ranges::KeyRanges;
use crate::functions::composition::ints;
use crate::functions::documents::Documents;
use crate::functions::selector::check_len;
use burn::tensor::{DType, Device, Int, Tensor};
use flash_dma_problem::AttentionError;

impl KeyRanges {
    twin! {
        /// Packed sequences whose documents may have other numbers of queries than keys, `[batch, 1, q_len]`: a query sees
        /// the keys of the document with its own number. If `causal`, each document is aligned bottom-right by itself: of
        /// `m` queries and `n` keys, query `i` sees the keys `j <= i + n - m`. The causal masking is in the ranges, so the
        /// plan and the call are to be made without. Padding sees nothing.
        ///
        /// ```
        /// # #[cfg(feature = "flex")] {
        /// use burn::tensor::{Device, Distribution, Tensor};
        /// use burn_flash_dma::{AttentionOptions, Documents, KeyRanges, MaskedAttention, TilePlan};
        ///
        /// let device = Device::flex();
        /// let rows = |heads, len| {
        ///     Tensor::<4>::random([2, heads, len, 16], Distribution::Default, &device)
        /// };
        /// // Two sequences of a batch, 6 queries over 20 keys, and 3 over 11.
        /// let queries = Documents::try_from_padded([6, 3], 6)?;
        /// let keys = Documents::try_from_padded([20, 11], 20)?;
        /// let ranges = KeyRanges::packed([&queries, &keys], true, &device);
        /// let plan = TilePlan::from_ranges(ranges, [6, 20], false);
        /// let attention = MaskedAttention::new(rows(4, 6), rows(2, 20), rows(2, 20)).plan(&plan);
        /// let out = attention.options(AttentionOptions::new().with_causal(false)).forward();
        /// assert_eq!(out.dims(), [2, 4, 6, 16]);
        /// # }
        /// # Ok::<(), burn_flash_dma::AttentionError>(())
        /// ```
        pub fn packed(documents: [&Documents; 2], causal: bool, device: &Device) -> Self
            = Self::try_packed;
    }

    /// Like [`packed`](Self::packed), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::DocumentBatch`] or [`AttentionError::DocumentCounts`] if queries and keys are not those of as
    /// many sequences and documents, [`AttentionError::DocumentTokens`] if the sequences of one of them are not equally
    /// long, or [`AttentionError::TooLarge`].
    pub fn try_packed(
        [queries, keys]: [&Documents; 2],
        causal: bool,
        device: &Device,
    ) -> Result<Self, AttentionError> {
        let batch = keys.lengths().len();
        let [q_len, k_len] = [queries.tokens(), keys.tokens()];
        check_len(k_len.max(q_len))?;
        queries.check([batch, 1, q_len])?;
        keys.check([batch, 1, k_len])?;
        let both = queries.lengths().iter().zip(keys.lengths());
        for (sequence, (own, of_keys)) in both.clone().enumerate() {
            if own.len() != of_keys.len() {
                return Err(AttentionError::DocumentCounts {
                    sequence,
                    queries: own.len(),
                    keys: of_keys.len(),
                });
            }
        }
        if batch * q_len == 0 {
            let none = Tensor::<3, Int>::zeros([batch, 1, q_len], (device, DType::I32));
            return Ok(Self::new(none.clone(), none));
        }
        let [mut first, mut end] = [vec![0i32; batch * q_len], vec![0i32; batch * q_len]];
        for (sequence, (own, of_keys)) in both.enumerate() {
            let (mut query, mut key) = (sequence * q_len, 0);
            for (&m, &n) in own.iter().zip(of_keys) {
                first[query..query + m].fill(key as i32);
                for i in 0..m {
                    let seen = if causal {
                        (i + 1 + n).saturating_sub(m)
                    } else {
                        n
                    };
                    end[query + i] = (key + seen) as i32;
                }
                (query, key) = (query + m, key + n);
            }
        }
        let shape = [batch, 1, q_len];
        Ok(Self::new(
            ints(first, shape, device),
            ints(end, shape, device),
        ))
    }

    /// The same as a mask over `k_len` keys, `[batch, heads, q_len, k_len]` in the axes of the ranges.
    pub(crate) fn into_mask(self, k_len: usize) -> AttentionMask {
        let [first, end] = self.into_bounds();
        let [batch, heads, queries] = first.dims();
        let (device, shape) = (first.device(), [batch, heads, queries, k_len]);
        if shape.contains(&0) {
            return AttentionMask::visible(Tensor::empty(shape, &device));
        }
        let keys = Tensor::<1, Int>::arange(0..k_len as i64, (&device, DType::I32));
        let keys = keys.reshape([1, 1, 1, k_len]).expand(shape);
        let wide = |bound: Tensor<3, Int>| bound.unsqueeze_dim::<4>(3).expand(shape);
        let behind = keys.clone().greater_equal(wide(first));
        AttentionMask::visible(behind.bool_and(keys.lower(wide(end))))
    }
}
