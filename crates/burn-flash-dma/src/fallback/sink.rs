//! A logit without a key, beside the results of an attention.

use super::logits::rounded;
#[cfg(feature = "autodiff")]
use super::logits::{unrounded, with_residual};
use super::tensors::to_f32;
#[cfg(feature = "autodiff")]
use crate::ops::types::{Forwarded, OptionalFloat, Saved};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::Shape;

/// See [`DynamicMaskOps::dynamic_mask_forward_with_sink`](crate::ops::DynamicMaskOps::dynamic_mask_forward_with_sink):
/// the output and the LSE of all logits, from those of the keys.
pub fn beside<B: Backend>(
    (out, lse): (FloatTensor<B>, FloatTensor<B>),
    logits: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let element = out.dtype().into();
    rounded::<B>(exact::<B>(to_f32::<B>(out), lse, logits), element)
}

/// The same of what a backward pass gets.
#[cfg(feature = "autodiff")]
pub fn forwarded_beside<B: Backend>(results: Forwarded<B>, logits: FloatTensor<B>) -> Forwarded<B> {
    let element = results.out.dtype().into();
    let out = unrounded::<B>(results.out, results.residual);
    with_residual::<B>(exact::<B>(out, results.lse, logits), element)
}

/// The gradient of the logits `[q_heads]`, from what the backward pass of all logits gets: the logit has no value, so its
/// own gradient is its weight times `grad_lse - grad_out . out`.
#[cfg(feature = "autodiff")]
pub fn gradient<B: Backend>(saved: &Saved<B>, logits: FloatTensor<B>) -> FloatTensor<B> {
    let heads = logits.shape();
    let out = unrounded::<B>(saved.out.clone(), saved.residual.cloned());
    let products = B::float_mul(to_f32::<B>(saved.grad_out.clone()), out);
    let sums = B::float_reshape(B::float_sum_dim(products, 3), saved.lse.shape());
    let inner = match &saved.grad_lse {
        OptionalFloat::None => B::float_neg(sums),
        OptionalFloat::Some(grad_lse) => B::float_sub(grad_lse.clone(), sums),
    };
    let weights = B::float_exp(B::float_sub(per_head::<B>(logits), saved.lse.clone()));
    let of_rows = B::float_mul(weights, inner);
    let of_heads = B::float_sum_dim(B::float_sum_dim(of_rows, 2), 0);
    B::float_reshape(of_heads, heads)
}

/// The share of its weight that a row's keys keep, `[batch, q_heads, q_len, 1]`, and the LSE of all logits.
pub fn shares<B: Backend>(
    lse: FloatTensor<B>,
    logits: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let logits = per_head::<B>(logits);
    let [batch, heads, rows] = lse.shape().dims();
    let share = B::sigmoid(B::float_sub(lse.clone(), logits.clone()));
    // Written so that an LSE of −∞ gives the logit itself.
    let rest = B::log_sigmoid(B::float_sub(logits.clone(), lse));
    (
        B::float_reshape(share, Shape::new([batch, heads, rows, 1])),
        B::float_sub(logits, rest),
    )
}

/// The output in f32, and the LSE, of all logits.
fn exact<B: Backend>(
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    logits: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (share, lse) = shares::<B>(lse, logits);
    (B::float_mul(out, share), lse)
}

fn per_head<B: Backend>(logits: FloatTensor<B>) -> FloatTensor<B> {
    let [heads] = logits.shape().dims();
    B::float_reshape(logits, Shape::new([1, heads, 1]))
}
