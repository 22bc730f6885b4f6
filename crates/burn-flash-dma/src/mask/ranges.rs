//! One range of keys per query: windows, documents and padding without a mask.

use super::polarity::{AttentionMask, broadcast_shape, expand};
use crate::documents::Documents;
use crate::fallback::running::{arange, running_max};
use crate::fallback::tensors::{ints, reshaped};
use crate::validate::check_len;
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use flash_dma_problem::{AttentionError, PlanGeometry};

/// The keys that each query sees, as one range: query `i` sees the keys `first <= j < end`, and none if `end <=
/// first`. These are O(q_len) numbers, where a mask has `q_len * k_len`. Used to make a
/// [`TilePlan`](crate::TilePlan).
///
/// The constructors have the names of [`AttentionMask`](crate::AttentionMask)'s and show the same keys.
#[derive(Clone, Debug)]
pub struct KeyRanges {
    first: Tensor<3, Int>,
    end: Tensor<3, Int>,
}

impl KeyRanges {
    /// The keys from `first` to before `end`, both `[batch | 1, q_heads | kv_heads | 1, q_len | 1]` of any integer
    /// type. Ranges are clipped to the existing keys.
    ///
    /// The shapes are checked by [`TilePlan::try_from_ranges`](crate::TilePlan::try_from_ranges), which knows the
    /// lengths.
    #[must_use]
    pub fn new(first: Tensor<3, Int>, end: Tensor<3, Int>) -> Self {
        let [first, end] = [first, end].map(saturate);
        Self { first, end }
    }

    /// A sliding window, `[1, 1, q_len]`: query `i` sees the `window` keys up to `i + k_len - q_len`.
    #[must_use]
    pub fn sliding_window([q_len, k_len]: [usize; 2], window: usize, device: &Device) -> Self {
        let shift = k_len as i64 - q_len as i64;
        let queries = arange(0..q_len as i64, device);
        let queries = reshaped(queries, [1, 1, q_len]);
        let end = queries.add_scalar(shift + 1);
        let window = i32::try_from(window).unwrap_or(i32::MAX);
        // A range that ends before the first key is empty wherever it begins; so nothing exceeds 32 bits.
        let first = end.clone().clamp_min(0).sub_scalar(window);
        Self::new(first, end)
    }

    /// Padding after sequences of the given `lengths` `[batch]`, `[batch, 1, 1]`: sequence `b` shows the keys `j <
    /// lengths[b]`.
    #[must_use]
    pub fn padding(lengths: Tensor<1, Int>) -> Self {
        let [batch] = lengths.dims();
        let end = reshaped(lengths, [batch, 1, 1]);
        Self::new(Tensor::zeros([1, 1, 1], &end.device()), end)
    }

    /// Packed sequences, `[batch, 1, len]`: `documents` `[batch, len]` holds the document of each token, and a
    /// token sees the run of tokens of the same document around it.
    ///
    /// Equal to [`AttentionMask::documents`](crate::AttentionMask::documents) if the tokens of each document are
    /// contiguous, as with ascending ids. A document whose id comes back after another one counts as two here.
    #[must_use]
    pub fn documents(documents: Tensor<2, Int>) -> Self {
        let [batch, len] = documents.dims();
        let device = documents.device();
        if batch == 0 || len < 2 {
            let first = Tensor::zeros([batch, 1, len], &device);
            return Self::new(first.clone(), first.add_scalar(1));
        }
        let at = |from: usize, to: usize| {
            let range = arange(from as i64..to as i64, &device);
            range.reshape([1, to - from]).expand([batch, to - from])
        };
        // True where another document begins after a token (all but the last).
        let changes: Tensor<2, Bool> =
            (documents.clone().narrow(1, 0, len - 1)).not_equal(documents.narrow(1, 1, len - 1));
        let zeros = at(0, 1);
        let first = at(1, len).mask_fill(changes.clone().bool_not(), 0);
        let first = running_max(Tensor::cat(vec![zeros.clone(), first], 1));
        // Counted from the end, ends are firsts: the number of tokens after the end of a run.
        let behind = at(1, len).mul_scalar(-1).add_scalar(len as i64);
        let behind = behind.mask_fill(changes.bool_not(), 0);
        let behind = running_max(Tensor::cat(vec![behind, zeros], 1).flip([1])).flip([1]);
        let end = behind.mul_scalar(-1).add_scalar(len as i64);
        let [first, end] = [first, end].map(|keys| keys.reshape([batch, 1, len]));
        Self::new(first, end)
    }

    twin! {
        /// Packed sequences whose documents may differ in numbers of queries and keys, `[batch, 1, q_len]`: a query
        /// sees the keys of the document with its own number. If `causal`, each document is aligned bottom-right by
        /// itself: of `m` queries and `n` keys, query `i` sees the keys `j <= i + n - m`. The ranges contain the
        /// causal masking, so make the plan and the call without it. Padding sees nothing.
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
    /// [`AttentionError::DocumentBatch`] or [`AttentionError::DocumentCounts`] if queries and keys differ in the
    /// number of sequences or documents, [`AttentionError::DocumentTokens`] if the sequences of one of them are not
    /// equally long, or [`AttentionError::TooLarge`].
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
        let [first, end] = [first, end].map(|keys| ints(keys, [batch, 1, q_len], device));
        Ok(Self::new(first, end))
    }

    /// The ranges as a mask over `k_len` keys, `[batch, heads, q_len, k_len]` in the axes of the ranges.
    pub(crate) fn into_mask(self, k_len: usize) -> AttentionMask {
        let [first, end] = self.into_bounds();
        let [batch, heads, queries] = first.dims();
        let (device, shape) = (first.device(), [batch, heads, queries, k_len]);
        if shape.contains(&0) {
            return AttentionMask::visible(Tensor::empty(shape, &device));
        }
        let keys = arange(0..k_len as i64, (&device, DType::I32));
        let keys = keys.reshape([1, 1, 1, k_len]).expand(shape);
        let wide = |bound: Tensor<3, Int>| bound.unsqueeze_dim::<4>(3).expand(shape);
        let behind = keys.clone().greater_equal(wide(first));
        AttentionMask::visible(behind.bool_and(keys.lower(wide(end))))
    }

    /// Keys that both show; axes of size 1 broadcast.
    ///
    /// # Panics
    ///
    /// If the shapes do not broadcast to one.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let pair = |a: Tensor<3, Int>, b: Tensor<3, Int>| {
            let shape = broadcast_shape(a.dims(), b.dims(), "ranges");
            [a, b].map(|keys| expand(keys, shape))
        };
        let [a, b] = pair(self.first, other.first);
        let [c, d] = pair(self.end, other.end);
        Self {
            first: a.max_pair(b),
            end: c.min_pair(d),
        }
    }

    pub(super) fn device(&self) -> Device {
        self.first.device()
    }

    pub(super) fn geometry(
        &self,
        lengths: [usize; 2],
        causal: bool,
    ) -> Result<PlanGeometry, AttentionError> {
        let (first, end) = (self.first.dims(), self.end.dims());
        let geometry = PlanGeometry::of_ranges(&first, &end, lengths, causal)?;
        let devices = [&self.first, &self.end].map(|keys| keys.device().without_autodiff());
        if devices[0] != devices[1] {
            return Err(AttentionError::RangesDevice);
        }
        Ok(geometry)
    }

    pub(super) fn into_bounds(self) -> [Tensor<3, Int>; 2] {
        let shape = broadcast_shape(self.first.dims(), self.end.dims(), "ranges");
        [self.first, self.end].map(|keys| expand(keys, shape))
    }

    /// First and end in the shape of the geometry's mask with a single key.
    pub(super) fn into_columns(self, geometry: &PlanGeometry) -> [Tensor<4, Int>; 2] {
        let [batch, heads, queries, _] = geometry.mask;
        [self.first, self.end].map(|keys| {
            let [b, h, q] = keys.dims();
            expand(keys.reshape([b, h, q, 1]), [batch, heads, queries, 1])
        })
    }
}

/// Converts to i32, saturating.
fn saturate(keys: Tensor<3, Int>) -> Tensor<3, Int> {
    let (least, most) = (i64::from(i32::MIN), i64::from(i32::MAX));
    match keys.dtype() {
        DType::I32 => keys,
        DType::I64 => keys.clamp(least, most).cast(DType::I32),
        DType::U32 | DType::U64 => keys.clamp_max(most).cast(DType::I32),
        _ => keys.cast(DType::I32),
    }
}
