//! The heads of q, k and v from one product.

use crate::engines::check_backend;
use crate::ops::TrainingOps;
use crate::validate::check_shape;
use burn::backend::Dispatch;
use burn::tensor::Tensor;
use flash_dma_problem::{AttentionError, TensorName};

twin! {
    /// Cuts `[batch, len, heads, head_dim]`, one product's result, into parts of so many heads each: q, k and v.
    ///
    /// The parts are slices, on CubeCL's runtimes views of `x` where they begin and end at the device's alignment (on CUDA
    /// 512 bytes); [`HeadEncoding`](crate::HeadEncoding) and attention read them in place. Their gradients are laid side by
    /// side once, where those of plain slices would be padded with zeros and added up. Any float type.
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
