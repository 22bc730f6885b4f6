//! Scores of keys.

use super::tensors::to_f32;
use crate::types::OptionalFloat;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::Shape;

/// `exp(a * softplus(values . dt_projᵀ + bias))`.
pub fn zoh<B: Backend>(
    values: FloatTensor<B>,
    dt_proj: FloatTensor<B>,
    bias: OptionalFloat<B>,
    a: FloatTensor<B>,
) -> FloatTensor<B> {
    let [batch, heads, len, head_dim] = values.shape().dims();
    let per_head = |tensor| B::float_reshape(to_f32::<B>(tensor), Shape::new([1, heads]));
    let rows = Shape::new([batch * len, heads * head_dim]);
    let tokens = B::float_reshape(B::float_swap_dims(values, 1, 2), rows);
    let dt_proj = B::float_transpose(to_f32::<B>(dt_proj));
    let mut dt = B::float_matmul(to_f32::<B>(tokens), dt_proj);
    if let OptionalFloat::Some(bias) = bias {
        dt = B::float_add(dt, per_head(bias));
    }
    // max(x, 0) + ln(1 + exp(-|x|)), which does not overflow.
    let rest = B::float_exp(B::float_neg(B::float_abs(dt.clone())));
    let steps = B::float_add(B::relu(dt), B::float_log1p(rest));
    let scores = B::float_exp(B::float_mul(steps, per_head(a)));
    let scores = B::float_reshape(scores, Shape::new([batch, len, heads]));
    B::float_swap_dims(scores, 1, 2)
}
