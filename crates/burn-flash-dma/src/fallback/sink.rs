//! A sink logit, added to the results of an attention.

use super::tensors::{bool_dtype, to_f32};
#[cfg(feature = "autodiff")]
use crate::types::Saved;
use crate::types::{Forwarded, OptionalFloat};
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape};

/// See
/// [`DynamicMaskOps::dynamic_mask_forward_with_sink`](crate::ops::DynamicMaskOps::dynamic_mask_forward_with_sink):
/// results over all logits from those over the keys, of which all are wanted.
pub fn with_sink<B: Backend>(results: Forwarded<B>, logits: FloatTensor<B>) -> Forwarded<B> {
    let element = results.out.dtype();
    let bools = bool_dtype::<B>(&results.lse.device());
    let out = unrounded::<B>(results.out, results.residual);
    let rest = results.lse_rest.into_option().expect("it was wanted");
    let (lse, logits) = (results.lse, per_head::<B>(logits));
    let [batch, heads, rows] = lse.shape().dims();
    let logits = B::float_expand(logits, lse.shape());
    let above = B::float_add(B::float_sub(lse.clone(), logits.clone()), rest.clone());
    let share = B::float_reshape(
        B::sigmoid(above.clone()),
        Shape::new([batch, heads, rows, 1]),
    );
    // Maximum of both, plus the logarithm of the sum relative to it. An LSE of −∞ gives the logit itself.
    let keys = B::float_greater_elem(above.clone(), 0.0f32.into(), bools);
    let more = B::float_neg(B::log_sigmoid(B::float_abs(above)));
    let small = B::float_mask_where(more.clone(), keys.clone(), B::float_add(more, rest));
    let (lse, lse_rest) = sum::<B>(B::float_mask_where(logits, keys, lse), small);
    let (out, residual) = rounded::<B>(B::float_mul(out, share), element);
    Forwarded {
        out,
        residual,
        lse,
        lse_rest: OptionalFloat::Some(lse_rest),
    }
}

/// Sum of a large and a small number, and its rounding error: 0 where the sum is not finite.
fn sum<B: Backend>(
    large: FloatTensor<B>,
    small: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let sum = B::float_add(large.clone(), small.clone());
    let rest = B::float_sub(small, B::float_sub(sum.clone(), large));
    let rest = B::float_mask_fill(rest, no_number::<B>(sum.clone()), 0.0f32.into());
    (sum, rest)
}

/// An f32 output in its element type, and the rounding error of 16 bits.
fn rounded<B: Backend>(
    exact: FloatTensor<B>,
    element: DType,
) -> (FloatTensor<B>, OptionalFloat<B>) {
    if element == DType::F32 {
        return (exact, OptionalFloat::None);
    }
    let out = B::float_cast(exact.clone(), element.into());
    let rounded = to_f32::<B>(out.clone());
    // NaN and infinity, which f16 may round to, have no rounding error.
    let no_number = no_number::<B>(rounded.clone());
    let loss = B::float_mask_fill(B::float_sub(exact, rounded), no_number, 0.0f32.into());
    (
        out,
        OptionalFloat::Some(B::float_cast(loss, element.into())),
    )
}

/// The output in f32, including its rounding error.
fn unrounded<B: Backend>(out: FloatTensor<B>, residual: OptionalFloat<B>) -> FloatTensor<B> {
    let out = to_f32::<B>(out);
    match residual {
        OptionalFloat::None => out,
        OptionalFloat::Some(residual) => B::float_add(out, to_f32::<B>(residual)),
    }
}

fn no_number<B: Backend>(tensor: FloatTensor<B>) -> BoolTensor<B> {
    let bools = bool_dtype::<B>(&tensor.device());
    let size = B::float_abs(tensor.clone());
    let infinite = B::float_equal_elem(size, f32::INFINITY.into(), bools);
    B::bool_or(infinite, B::float_is_nan(tensor, bools))
}

/// Gradient of the logits `[q_heads]`, from the saved tensors and gradients over all logits: the logit has no value,
/// so its gradient is its weight times `grad_lse - grad_out . out`.
#[cfg(feature = "autodiff")]
pub fn gradient<B: Backend>(saved: &Saved<B>, logits: FloatTensor<B>) -> FloatTensor<B> {
    let heads = logits.shape();
    let residual = OptionalFloat::from_option(saved.residual.as_option().cloned());
    let out = unrounded::<B>(saved.out.clone(), residual);
    let products = B::float_mul(to_f32::<B>(saved.grad_out.clone()), out);
    let sums = B::float_reshape(B::float_sum_dim(products, 3), saved.lse.shape());
    let inner = match &saved.grad_lse {
        OptionalFloat::None => B::float_neg(sums),
        OptionalFloat::Some(grad_lse) => B::float_sub(grad_lse.clone(), sums),
    };
    // Large numbers cancel before a small one is subtracted.
    let logits = B::float_expand(per_head::<B>(logits), saved.lse.shape());
    let above = B::float_sub(logits, saved.lse.clone());
    let above = match saved.lse_rest.as_option() {
        None => above,
        Some(rest) => B::float_sub(above, rest.clone()),
    };
    // At most 0 up to rounding. NaN stays.
    let bools = bool_dtype::<B>(&above.device());
    let positive = B::float_greater_elem(above.clone(), 0.0f32.into(), bools);
    let weights = B::float_exp(B::float_mask_fill(above, positive, 0.0f32.into()));
    let of_rows = B::float_mul(weights, inner);
    let of_heads = B::float_sum_dim(B::float_sum_dim(of_rows, 2), 0);
    B::float_reshape(of_heads, heads)
}

/// Share of the probability that a row's keys keep, `[batch, q_heads, q_len, 1]`, and the LSE of all logits.
pub fn shares<B: Backend>(
    lse: FloatTensor<B>,
    logits: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let logits = per_head::<B>(logits);
    let [batch, heads, rows] = lse.shape().dims();
    let share = B::sigmoid(B::float_sub(lse.clone(), logits.clone()));
    // In this form an LSE of −∞ gives the logit itself.
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
