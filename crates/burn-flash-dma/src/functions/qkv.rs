//! Calls of attention whose q, k and v, or k and v, are one tensor.

use super::attention::Attention;
use super::masked::MaskedAttention;
use crate::engines::check_backend;
use crate::ops::packed::PackedOps;
use crate::validate::{check_shape, expect};
use burn::backend::Dispatch;
use burn::tensor::Tensor;
use flash_dma_problem::{AttentionError, TensorName};

twin! {
    /// q, k and v, `[batch, heads, len, head_dim]` each, of one tensor `[batch, len, 3, heads, head_dim]`.
    ///
    /// ```
    /// # #[cfg(all(feature = "flex", feature = "autodiff"))] {
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_flash_dma::{Attention, AttentionOptions, split_qkv};
    ///
    /// let device = Device::flex().autodiff();
    /// let qkv = Tensor::<5>::random([2, 100, 3, 4, 32], Distribution::Default, &device).require_grad();
    /// let scores = Tensor::<3>::random([2, 4, 100], Distribution::Default, &device);
    ///
    /// let [q, k, v] = split_qkv(qkv.clone());
    /// let options = AttentionOptions::new().with_keep_window(16);
    /// let out = Attention::new(q, k, v).scores(scores).options(options).forward();
    /// // A token's heads lie together: this is a view.
    /// let out = out.swap_dims(1, 2);
    /// assert_eq!(out.dims(), [2, 100, 4, 32]);
    /// assert_eq!(qkv.grad(&out.sum().backward()).unwrap().dims(), [2, 100, 3, 4, 32]);
    /// # }
    /// ```
    ///
    /// Nothing is copied, in either direction, where attention is all that reads the parts:
    ///
    /// - the parts are views of the tensor. CubeCL's runtimes copy those that do not begin at the device's alignment: on
    ///   CUDA 512 bytes, which every part does if `heads * head_dim` is a multiple of 256 (of 128 in f32);
    /// - the backward pass writes the gradients of the parts into one buffer, and the gradient of the tensor is a view of it,
    ///   part by part and head by head: what reshapes it to `[batch * len, 3 * heads * head_dim]`, as a linear layer before it
    ///   does, copies it once. A part that something else reads as well, such as scores made of v, has its gradient in
    ///   another buffer, and the three are laid side by side once, as those of [`split_heads`](crate::split_heads).
    ///
    /// Any float type.
    pub fn split_qkv(qkv: Tensor<5>) -> [Tensor<4>; 3] = try_split_qkv;
}

/// Like [`split_qkv`], but returns the error. Empty parts are constants to autodiff.
///
/// # Errors
///
/// [`AttentionError::Shape`] if axis 2 has not size 3, or [`AttentionError::NoEngine`]; nothing is computed then.
pub fn try_split_qkv(qkv: Tensor<5>) -> Result<[Tensor<4>; 3], AttentionError> {
    split(TensorName::PackedQueryKeyValue, qkv)
}

twin! {
    /// k and v, `[batch, kv_heads, len, head_dim]` each, of one tensor `[batch, len, 2, kv_heads, head_dim]`, for queries
    /// that have a tensor of their own, as with grouped heads. As [`split_qkv`].
    pub fn split_kv(kv: Tensor<5>) -> [Tensor<4>; 2] = try_split_kv;
}

/// Like [`split_kv`], but returns the error. Empty parts are constants to autodiff.
///
/// # Errors
///
/// [`AttentionError::Shape`] if axis 2 has not size 2, or [`AttentionError::NoEngine`]; nothing is computed then.
pub fn try_split_kv(kv: Tensor<5>) -> Result<[Tensor<4>; 2], AttentionError> {
    split(TensorName::PackedKeyValue, kv)
}

/// Two or three parts.
fn split<const N: usize>(name: TensorName, x: Tensor<5>) -> Result<[Tensor<4>; N], AttentionError> {
    let [batch, len, _, heads, head_dim] = x.dims();
    check_shape(name, &x.dims(), &[batch, len, N, heads, head_dim])?;
    check_backend(&x.device())?;
    let shape = [batch, heads, len, head_dim];
    if shape.contains(&0) {
        let options = (&x.device(), x.dtype());
        return Ok(std::array::from_fn(|_| Tensor::zeros(shape, options)));
    }
    let parts = Dispatch::packed_split(x.into_dispatch()).into_parts();
    let mut parts = parts.into_iter().map(Tensor::from_dispatch);
    Ok(std::array::from_fn(|_| parts.next().expect("N parts")))
}

/// The constructors of a call from packed tensors.
macro_rules! from_packed {
    ($call:ty) => {
        impl $call {
            /// Self-attention of packed heads, `[batch, len, 3, heads, head_dim]`: [`new`](Self::new) of [`split_qkv`].
            ///
            /// # Panics
            ///
            /// If [`try_from_qkv`](Self::try_from_qkv) returns an error, with that error's text.
            pub fn from_qkv(qkv: Tensor<5>) -> Self {
                expect(Self::try_from_qkv(qkv))
            }

            /// Like [`from_qkv`](Self::from_qkv), but returns the error.
            ///
            /// # Errors
            ///
            /// Those of [`try_split_qkv`].
            pub fn try_from_qkv(qkv: Tensor<5>) -> Result<Self, AttentionError> {
                let [q, k, v] = try_split_qkv(qkv)?;
                Ok(Self::new(q, k, v))
            }

            /// Attention of `q`, `[batch, q_heads, q_len, head_dim]`, over packed keys and values,
            /// `[batch, k_len, 2, kv_heads, head_dim]`: [`new`](Self::new) of [`split_kv`].
            ///
            /// # Panics
            ///
            /// If [`try_from_q_kv`](Self::try_from_q_kv) returns an error, with that error's text.
            pub fn from_q_kv(q: Tensor<4>, kv: Tensor<5>) -> Self {
                expect(Self::try_from_q_kv(q, kv))
            }

            /// Like [`from_q_kv`](Self::from_q_kv), but returns the error.
            ///
            /// # Errors
            ///
            /// Those of [`try_split_kv`].
            pub fn try_from_q_kv(q: Tensor<4>, kv: Tensor<5>) -> Result<Self, AttentionError> {
                let [k, v] = try_split_kv(kv)?;
                Ok(Self::new(q, k, v))
            }
        }
    };
}
from_packed!(Attention);
from_packed!(MaskedAttention);
