//! q, k and v from one tensor or one product.

use super::attention::Attention;
use super::masked::MaskedAttention;
use crate::engines::check_backend;
use crate::ops::TrainingOps;
use crate::ops::packed::PackedOps;
use crate::validate::{check_shape, expect};
use burn::backend::Dispatch;
use burn::tensor::Tensor;
use flash_dma_problem::{AttentionError, TensorName};

twin! {
    /// Splits a tensor `[batch, len, 3, heads, head_dim]` into q, k and v, `[batch, heads, len, head_dim]` each.
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
    /// Any float type. Nothing is copied, in either direction, if only attention reads the parts:
    ///
    /// - the parts are views. CubeCL's runtimes copy those that do not begin at the device's alignment: 512 bytes on
    ///   CUDA, which every part meets if `heads * head_dim` is a multiple of 256 (of 128 in f32);
    /// - the gradient of the tensor is a view of one buffer, part by part and head by head: a linear layer before it,
    ///   which reshapes it to `[batch * len, 3 * heads * head_dim]`, copies it once. If something else reads a part
    ///   as well, such as scores made of v, the three gradients are concatenated once.
    pub fn split_qkv(qkv: Tensor<5>) -> [Tensor<4>; 3] = try_split_qkv;
}

/// Like [`split_qkv`], but returns the error. Empty parts are constants to autodiff.
///
/// # Errors
///
/// [`AttentionError::Shape`] if axis 2 does not have size 3, or [`AttentionError::NoEngine`]; nothing is computed
/// then.
pub fn try_split_qkv(qkv: Tensor<5>) -> Result<[Tensor<4>; 3], AttentionError> {
    split(TensorName::PackedQueryKeyValue, qkv)
}

twin! {
    /// Splits a tensor `[batch, len, 2, kv_heads, head_dim]` into k and v, `[batch, kv_heads, len, head_dim]` each,
    /// for queries with a tensor of their own, as with grouped heads. Otherwise like [`split_qkv`].
    pub fn split_kv(kv: Tensor<5>) -> [Tensor<4>; 2] = try_split_kv;
}

/// Like [`split_kv`], but returns the error. Empty parts are constants to autodiff.
///
/// # Errors
///
/// [`AttentionError::Shape`] if axis 2 does not have size 2, or [`AttentionError::NoEngine`]; nothing is computed
/// then.
pub fn try_split_kv(kv: Tensor<5>) -> Result<[Tensor<4>; 2], AttentionError> {
    split(TensorName::PackedKeyValue, kv)
}

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

twin! {
    /// Splits `[batch, len, heads, head_dim]`, the result of one product, into parts of the given numbers of heads:
    /// q, k and v.
    ///
    /// The parts are slices: on CubeCL's runtimes views of `x` where they begin and end at the device's alignment
    /// (512 bytes on CUDA), which [`HeadEncoding`](crate::HeadEncoding) and attention read in place. Their gradients
    /// are concatenated once, where those of plain slices would be zero-padded and added. Any float type.
    ///
    /// ```
    /// # #[cfg(all(feature = "flex", feature = "autodiff"))] {
    /// # use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_flash_dma::{product, split_heads};
    ///
    /// # let device = Device::flex().autodiff();
    /// # let normal = Distribution::Normal(0.0, 1.0);
    /// let x = Tensor::<3>::random([2, 10, 64], normal, &device);
    /// let weight = Tensor::<2>::random([64, 8 * 16], normal, &device).require_grad();
    /// let heads = product(x, weight.clone()).reshape([2, 10, 8, 16]);
    /// let [q, k, v] = split_heads(heads, [4, 2, 2]);
    /// assert_eq!((q.dims(), k.dims(), v.dims()), ([2, 10, 4, 16], [2, 10, 2, 16], [2, 10, 2, 16]));
    /// # assert!(weight.grad(&(k.sum() * v.sum()).backward()).is_some());
    /// # }
    /// ```
    pub fn split_heads<const N: usize>(x: Tensor<4>, heads: [usize; N]) -> [Tensor<4>; N]
        = try_split_heads;
}

/// Like [`split_heads`], but returns the error. An empty part is a constant to autodiff.
///
/// # Errors
///
/// [`AttentionError::Shape`] if the heads of the parts do not add up to those of `x`, or
/// [`AttentionError::NoEngine`]; nothing is computed then.
pub fn try_split_heads<const N: usize>(
    x: Tensor<4>,
    heads: [usize; N],
) -> Result<[Tensor<4>; N], AttentionError> {
    let [batch, len, _, head_dim] = x.dims();
    let of_part = |heads| [batch, len, heads, head_dim];
    let all = heads.iter().fold(0usize, |sum, &n| sum.saturating_add(n));
    check_shape(TensorName::Tokens, &x.dims(), &of_part(all))?;
    check_backend(&x.device())?;
    let options = (&x.device(), x.dtype());
    let is_empty = |heads: usize| of_part(heads).contains(&0);
    let sizes = heads.into_iter().filter(|&heads| !is_empty(heads));
    let sizes: Vec<_> = sizes.collect();
    let parts = match sizes.is_empty() {
        true => Vec::new(),
        false => Dispatch::training_split(x.into_dispatch(), 2, sizes),
    };
    let mut parts = parts.into_iter();
    Ok(heads.map(|heads| match is_empty(heads) {
        true => Tensor::zeros(of_part(heads), options),
        false => Tensor::from_dispatch(parts.next().expect("a part of each size")),
    }))
}

/// Constructors of a call from packed tensors.
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
            /// See [`try_split_qkv`].
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
            /// See [`try_split_kv`].
            pub fn try_from_q_kv(q: Tensor<4>, kv: Tensor<5>) -> Result<Self, AttentionError> {
                let [k, v] = try_split_kv(kv)?;
                Ok(Self::new(q, k, v))
            }
        }
    };
}
from_packed!(Attention);
from_packed!(MaskedAttention);
