//! A logit without a key, beside the results of an attention.

use super::logits::{Exact, Lse, unrounded, with_residual};
use super::tensors::bool_dtype;
#[cfg(feature = "autodiff")]
use super::tensors::to_f32;
use crate::ops::types::Forwarded;
#[cfg(feature = "autodiff")]
use crate::ops::types::{OptionalFloat, Saved};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::Shape;

/// See [`DynamicMaskOps::dynamic_mask_forward_with_sink`](crate::ops::DynamicMaskOps::dynamic_mask_forward_with_sink):
/// the results of all logits, from those of the keys.
pub fn beside<B: Backend>(results: Forwarded<B>, logits: FloatTensor<B>) -> Forwarded<B> {
    let element = results.out.dtype().into();
    let bools = bool_dtype::<B>(&results.lse.device());
    let out = unrounded::<B>(results.out, results.residual);
    let [lse, rest, logits] = [results.lse, results.lse_rest, per_head::<B>(logits)];
    let [batch, heads, rows] = lse.shape().dims();
    let logits = B::float_expand(logits, lse.shape());
    let above = B::float_add(B::float_sub(lse.clone(), logits.clone()), rest.clone());
    let share = B::float_reshape(
        B::sigmoid(above.clone()),
        Shape::new([batch, heads, rows, 1]),
    );
    // The greater of both, and the logarithm of the sum relative to it. An LSE of −∞ gives the logit itself.
    let keys = B::float_greater_elem(above.clone(), 0.0f32.into(), bools);
    let more = B::float_neg(B::log_sigmoid(B::float_abs(above)));
    let small = B::float_mask_where(more.clone(), keys.clone(), B::float_add(more, rest));
    let exact = Exact {
        out: B::float_mul(out, share),
        lse: Lse::of_sum(B::float_mask_where(logits, keys, lse), small),
    };
    with_residual::<B>(exact, element)
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
    let lse = Lse::saved(saved, &saved.lse.shape());
    let weights = lse.weights(B::float_expand(per_head::<B>(logits), saved.lse.shape()));
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

fn per_head<B: Backend>(logits: FloatTensor<B>) -> FloatTensor<B> {
    let [heads] = logits.shape().dims();
    B::float_reshape(logits, Shape::new([1, heads, 1]))
}
