//! Tile plans of masks.

use super::polarity::AttentionMask;
use super::ranges::KeyRanges;
use crate::engines::check_backend;
use crate::fallback::tensors::bool_dtype;
use crate::ops::masked::MaskedAttentionOps;
use crate::types::{OptionalPlan, PlanTensors};
use burn::backend::tensor::{BoolTensor, IntTensor};
use burn::backend::{Backend, Dispatch, TensorMetadata};
use burn::tensor::{Bool, Int, IntDType, Shape, Slice, Tensor};
use flash_dma_problem::{AttentionError, PlanGeometry};

/// A mask as attention reads it: one bit per pair, and for each block of 16 queries and 64 keys the number of visible
/// pairs, so that empty blocks are skipped and full ones are not tested.
///
/// A plan is an eighth the size of its mask and does not need the mask any more. It serves every layer with the same
/// mask: build it once, and pass it to [`MaskedAttention::plan`](crate::MaskedAttention::plan). Its lengths and
/// causal masking are fixed; axes that the mask broadcasts stay broadcast.
///
/// If each query sees one range of keys, as in a sliding window, [`from_ranges`](Self::from_ranges) makes the plan
/// without a mask.
#[derive(Clone, Debug)]
pub struct TilePlan {
    bits: Tensor<5, Int>,
    counts: Tensor<4, Int>,
    geometry: PlanGeometry,
}

impl TilePlan {
    twin! {
        /// Plan of a mask for `lengths = [q_len, k_len]`, combined with bottom-right aligned causal masking if
        /// `causal`.
        pub fn new(mask: AttentionMask, lengths: [usize; 2], causal: bool) -> Self = Self::try_new;
    }

    /// Like [`new`](Self::new), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Broadcast`] if the mask does not broadcast to the lengths, [`AttentionError::TooLarge`], or
    /// [`AttentionError::NoEngine`].
    pub fn try_new(
        mask: AttentionMask,
        lengths: [usize; 2],
        causal: bool,
    ) -> Result<Self, AttentionError> {
        let geometry = PlanGeometry::new(&mask.dims(), lengths, causal)?;
        check_backend(&mask.device())?;
        Ok(Self::of(mask, geometry))
    }

    twin! {
        /// Plan of the mask that shows each query its range of keys, for `lengths = [q_len, k_len]`, combined with
        /// bottom-right aligned causal masking if `causal`. Only the bits take `q_len` times `k_len`.
        ///
        /// ```
        /// # #[cfg(feature = "flex")] {
        /// use burn::tensor::{Device, Int, Tensor};
        /// use burn_flash_dma::{AttentionMask, KeyRanges, TilePlan};
        ///
        /// let device = Device::flex();
        /// let ids = Tensor::<2, Int>::from_data([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]], &device);
        /// // A window of 3 within documents, which a mask could show as well.
        /// let ranges = KeyRanges::documents(ids.clone()).and(KeyRanges::sliding_window([10, 10], 3, &device));
        /// let mask = AttentionMask::documents(ids).and(AttentionMask::sliding_window([10, 10], 3, &device));
        ///
        /// let plan = TilePlan::from_ranges(ranges, [10, 10], true);
        /// let same = TilePlan::new(mask, [10, 10], true);
        /// assert_eq!(plan.counts().clone().into_data(), same.counts().clone().into_data());
        /// # }
        /// ```
        pub fn from_ranges(ranges: KeyRanges, lengths: [usize; 2], causal: bool) -> Self
            = Self::try_from_ranges;
    }

    /// Like [`from_ranges`](Self::from_ranges), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Broadcast`] if the ranges do not broadcast to each other or to the queries,
    /// [`AttentionError::RangesDevice`], [`AttentionError::TooLarge`], or [`AttentionError::NoEngine`].
    pub fn try_from_ranges(
        ranges: KeyRanges,
        lengths: [usize; 2],
        causal: bool,
    ) -> Result<Self, AttentionError> {
        let geometry = ranges.geometry(lengths, causal)?;
        check_backend(&ranges.device())?;
        let [first, end] = ranges.into_columns(&geometry).map(Tensor::into_dispatch);
        let tensors = Dispatch::masked_attention_plan_ranges(first, end, geometry);
        Ok(Self::from_tensors(tensors, geometry))
    }

    /// Plan of a mask in the shape of a geometry.
    pub(crate) fn of(mask: AttentionMask, geometry: PlanGeometry) -> Self {
        let (mask, hidden) = mask.into_parts();
        let tensors = Dispatch::masked_attention_plan(mask.into_dispatch(), hidden, geometry);
        Self::from_tensors(tensors, geometry)
    }

    fn from_tensors(tensors: PlanTensors<Dispatch>, geometry: PlanGeometry) -> Self {
        Self {
            bits: Tensor::from_dispatch(tensors.bits),
            counts: Tensor::from_dispatch(tensors.counts),
            geometry,
        }
    }

    /// Shapes, lengths and causal masking of the plan.
    #[must_use]
    pub fn geometry(&self) -> &PlanGeometry {
        &self.geometry
    }

    /// Number of visible pairs in each block, `[batch, heads, q_len / 16, k_len / 64]` (rounded up): 0 for an empty
    /// block, [`PlanGeometry::pairs`] for a full one.
    #[must_use]
    pub fn counts(&self) -> &Tensor<4, Int> {
        &self.counts
    }

    /// One bit per pair, `[batch, heads, key_blocks, queries, 2]`, laid out as in [`PlanGeometry`].
    #[must_use]
    pub fn bits(&self) -> &Tensor<5, Int> {
        &self.bits
    }

    /// Rows of the mask for some queries, or its single row if it has one for all: `[batch, heads, rows | 1, k_len |
    /// 1]` in the mask's axes, causal masking aside.
    pub(crate) fn visible_rows(&self, queries: Tensor<1, Int>) -> Tensor<4, Bool> {
        let (mut geometry, mut bits) = (self.geometry, self.bits.clone());
        if geometry.mask[2] > 1 {
            [geometry.mask[2]] = queries.dims();
            bits = bits.select(3, queries);
        }
        Tensor::from_dispatch(unpack::<Dispatch>(bits.into_dispatch(), &geometry))
    }

    pub(crate) fn into_dispatch(self) -> OptionalPlan<Dispatch> {
        OptionalPlan::Some {
            bits: self.bits.into_dispatch(),
            counts: self.counts.into_dispatch(),
        }
    }
}

const WORD: usize = 32;
const KEYS: usize = PlanGeometry::KEY_BLOCK;

/// The mask in its own shape, from its bits.
fn unpack<B: Backend>(bits: IntTensor<B>, plan: &PlanGeometry) -> BoolTensor<B> {
    let device = bits.device();
    let [batch, heads, blocks, queries, _] = plan.bits_shape();
    let shape = Shape::new([batch * heads, blocks, queries, 2, WORD]);
    let words = B::int_reshape(bits, Shape::new([batch * heads, blocks, queries, 2, 1]));
    let powers = B::int_reshape(powers::<B>(&device), Shape::new([1, 1, 1, 1, WORD]));
    let masked = B::bitwise_and(
        B::int_expand(words, shape.clone()),
        B::int_expand(powers, shape),
    );
    let shown = B::bool_not(B::int_equal_elem(
        masked,
        0.into(),
        bool_dtype::<B>(&device),
    ));
    let shown = B::bool_swap_dims(shown, 1, 2);
    let shown = B::bool_reshape(shown, Shape::new([batch, heads, queries, blocks * KEYS]));
    let mut slices = vec![Slice::full(); 3];
    slices.push((0..plan.mask[3]).into());
    B::bool_slice(shown, &slices)
}

/// `2^0 .. 2^31` as 32-bit words.
fn powers<B: Backend>(device: &B::Device) -> IntTensor<B> {
    let exponents = B::int_arange(0..WORD as i64, device, IntDType::I32);
    let ones = B::int_ones(Shape::new([WORD]), device, IntDType::I32);
    B::bitwise_left_shift(ones, exponents)
}
