//! Functions for the most common calls, each a builder with its usual parts.

use super::attention::Attention;
use super::masked::MaskedAttention;
use super::scores::try_zoh_scores;
use crate::mask::polarity::AttentionMask;
use burn::tensor::Tensor;
use flash_dma_problem::{AttentionError, AttentionOptions};

twin! {
    /// Dynamic-mask attention: every query attends to the `options.keep_window` visible keys of greatest score, and
    /// each logit gets its key's score. [`Attention`] has the formula, the shapes and the types, and more: the LSE,
    /// and given intervals.
    pub fn dynamic_mask_attention(
        q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, scores: Tensor<3>, options: AttentionOptions
    ) -> Tensor<4> = try_dynamic_mask_attention;
}

/// Like [`dynamic_mask_attention`], but returns the error.
///
/// # Errors
///
/// [`AttentionError`] if the shapes, element types, devices or options do not fit; nothing is computed then.
pub fn try_dynamic_mask_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let attention = Attention::new(q, k, v).scores(scores);
    attention.options(options).try_forward()
}

twin! {
    /// Plain attention without scores: every visible key is attended. `options.keep_window` must be `None`.
    pub fn attention(
        q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: AttentionOptions
    ) -> Tensor<4> = try_attention;
}

/// Like [`attention`], but returns the error.
///
/// # Errors
///
/// See [`try_dynamic_mask_attention`].
pub fn try_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    Attention::new(q, k, v).options(options).try_forward()
}

twin! {
    /// Dynamic-mask attention from DMA's learned parameters: [`zoh_scores`](crate::zoh_scores()) of `v`, then
    /// [`dynamic_mask_attention`]. `v` has two gradient paths.
    ///
    /// `dt_proj` is `[kv_heads, kv_heads * head_dim]`, `a` `[kv_heads]`.
    pub fn flash_dma_attention(
        q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, dt_proj: Tensor<2>, a: Tensor<1>,
        options: AttentionOptions
    ) -> Tensor<4> = try_flash_dma_attention;
}

/// Like [`flash_dma_attention`], but returns the error.
///
/// # Errors
///
/// Errors of [`try_dynamic_mask_attention`] and [`try_zoh_scores`](crate::try_zoh_scores()).
pub fn try_flash_dma_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    dt_proj: Tensor<2>,
    a: Tensor<1>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let scores = try_zoh_scores(v.clone(), dt_proj, a)?;
    try_dynamic_mask_attention(q, k, v, scores, options)
}

twin! {
    /// Attention under a mask and a bias, and causal masking if the options ask for it. [`MaskedAttention`] has the
    /// formula, the shapes and the types. Cuts the mask into tiles first; to do that once for several calls, pass a
    /// [`TilePlan`](crate::TilePlan) to [`MaskedAttention::plan`].
    ///
    /// ```
    /// # #[cfg(all(feature = "flex", feature = "autodiff"))] {
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_flash_dma::{AttentionMask, AttentionOptions, masked_attention};
    ///
    /// let device = Device::flex().autodiff();
    /// let normal = Distribution::Normal(0.0, 1.0);
    /// let q = Tensor::<4>::random([1, 4, 100, 32], normal, &device);
    /// let k = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
    /// let v = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
    /// // One bias per key and kv head, and no key attends to the last ten.
    /// let bias = Tensor::<4>::random([1, 2, 1, 100], normal, &device).require_grad();
    /// let padding = Tensor::<1, burn::tensor::Int>::arange(0..100, &device).greater_equal_elem(90);
    ///
    /// let mask = AttentionMask::hidden(padding.reshape([1, 1, 1, 100]));
    /// let out = masked_attention(q, k, v, Some(mask), Some(bias.clone()), AttentionOptions::new());
    /// let grads = out.sum().backward();
    /// assert_eq!(bias.grad(&grads).unwrap().dims(), [1, 2, 1, 100]);
    /// # }
    /// ```
    pub fn masked_attention(
        q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: Option<AttentionMask>,
        bias: Option<Tensor<4>>, options: AttentionOptions
    ) -> Tensor<4> = try_masked_attention;
}

/// Like [`masked_attention`], but returns the error.
///
/// # Errors
///
/// [`AttentionError`] if the shapes, element types, devices or options do not fit; nothing is computed then.
pub fn try_masked_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Option<AttentionMask>,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let attention = MaskedAttention::new(q, k, v).mask(mask).bias(bias);
    attention.options(options).try_forward()
}
