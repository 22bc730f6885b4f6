//! Norms and rotary encoding: [`NormOps`](crate::ops::NormOps), linear in time and memory.

use super::tensors::to_f32;
use crate::spans::span;
use crate::types::{NormGrads, Normed, OptionalFloat};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice};
use flash_dma_problem::NormProblem;

const PARTS: usize = 256;

/// See [`NormOps::rms_norm`](crate::ops::NormOps::rms_norm).
pub fn rms_norm<B: Backend>(
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    problem: NormProblem,
) -> FloatTensor<B> {
    let _span = span!("norm_forward", engine = "default-bodies");
    let shape = x.shape();
    let rows = match problem.is_empty() {
        true => return x,
        false => B::float_reshape(x, Shape::new(problem.x_shape())),
    };
    let out = encode_heads::<B>(
        rows,
        OptionalFloat::Some(gamma),
        OptionalFloat::None,
        problem,
    );
    B::float_reshape(out, shape)
}

/// See [`NormOps::rms_norm_backward`](crate::ops::NormOps::rms_norm_backward).
pub fn rms_norm_backward<B: Backend>(
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    grad_out: FloatTensor<B>,
    problem: NormProblem,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let _span = span!("norm_backward", engine = "default-bodies");
    let shape = x.shape();
    if problem.is_empty() {
        let dtype = gamma.dtype().into();
        let none = B::float_zeros(gamma.shape(), &gamma.device(), dtype);
        return (grad_out, none);
    }
    let grads = encode_heads_backward::<B>(
        B::float_reshape(grad_out, Shape::new(problem.out_shape())),
        Normed::Some {
            x: B::float_reshape(x, Shape::new(problem.x_shape())),
            gamma,
        },
        OptionalFloat::None,
        problem,
    );
    let gamma = grads.gamma.into_option().expect("there is a norm");
    (B::float_reshape(grads.x, shape), gamma)
}

/// See [`NormOps::encode_heads`](crate::ops::NormOps::encode_heads).
pub fn encode_heads<B: Backend>(
    x: FloatTensor<B>,
    gamma: OptionalFloat<B>,
    table: OptionalFloat<B>,
    problem: NormProblem,
) -> FloatTensor<B> {
    let _span = span!("norm_forward", engine = "default-bodies");
    let (device, dtype) = (x.device(), x.dtype().into());
    if problem.is_empty() {
        return B::float_zeros(problem.out_shape().into(), &device, dtype);
    }
    let mut rows = to_f32::<B>(x);
    if let (OptionalFloat::Some(gamma), Some(epsilon)) = (gamma, problem.epsilon) {
        let scaled = B::float_mul(rows.clone(), reciprocal::<B>(rows, epsilon));
        rows = B::float_mul(scaled, weights::<B>(gamma));
    }
    let rows = rotate::<B>(rows, table, &problem, false);
    B::float_cast(B::float_swap_dims(rows, 1, 2), dtype)
}

/// See [`NormOps::encode_heads_backward`](crate::ops::NormOps::encode_heads_backward).
pub fn encode_heads_backward<B: Backend>(
    grad_out: FloatTensor<B>,
    normed: Normed<B>,
    table: OptionalFloat<B>,
    problem: NormProblem,
) -> NormGrads<B> {
    let _span = span!("norm_backward", engine = "default-bodies");
    let (device, dtype) = (grad_out.device(), grad_out.dtype().into());
    if problem.is_empty() {
        return NormGrads {
            x: B::float_zeros(problem.x_shape().into(), &device, dtype),
            gamma: match normed {
                Normed::None => OptionalFloat::None,
                Normed::Some { gamma, .. } => {
                    let dtype = gamma.dtype().into();
                    OptionalFloat::Some(B::float_zeros(gamma.shape(), &device, dtype))
                }
            },
        };
    }
    let grads = B::float_swap_dims(to_f32::<B>(grad_out), 1, 2);
    let grads = rotate::<B>(grads, table, &problem, true);
    let (Normed::Some { x, gamma }, Some(epsilon)) = (normed, problem.epsilon) else {
        return NormGrads {
            x: B::float_cast(grads, dtype),
            gamma: OptionalFloat::None,
        };
    };
    let gamma_dtype = gamma.dtype().into();
    let x = to_f32::<B>(x);
    let r = reciprocal::<B>(x.clone(), epsilon);
    let normal = B::float_mul(x, r.clone());
    let of_gamma = sum_rows::<B>(B::float_mul(grads.clone(), normal.clone()), &problem);
    let weighted = B::float_mul(grads, weights::<B>(gamma));
    let mean = B::float_mean_dim(B::float_mul(weighted.clone(), normal.clone()), 3);
    let of_x = B::float_mul(B::float_sub(weighted, B::float_mul(normal, mean)), r);
    NormGrads {
        x: B::float_cast(of_x, dtype),
        gamma: OptionalFloat::Some(B::float_cast(of_gamma, gamma_dtype)),
    }
}

/// `1 / sqrt(mean of x² + epsilon)` of each row, `[.., 1]`.
fn reciprocal<B: Backend>(x: FloatTensor<B>, epsilon: f32) -> FloatTensor<B> {
    let mean = B::float_mean_dim(B::float_mul(x.clone(), x), 3);
    B::float_recip(B::float_sqrt(B::float_add_scalar(mean, epsilon.into())))
}

fn weights<B: Backend>(gamma: FloatTensor<B>) -> FloatTensor<B> {
    let width = gamma.shape().num_elements();
    B::float_reshape(to_f32::<B>(gamma), Shape::new([1, 1, 1, width]))
}

/// Rotates neighbouring features of `[batch, len, heads, head_dim]` by the angles of their positions, or back.
fn rotate<B: Backend>(
    rows: FloatTensor<B>,
    table: OptionalFloat<B>,
    problem: &NormProblem,
    back: bool,
) -> FloatTensor<B> {
    let (OptionalFloat::Some(table), Some(rotary)) = (table, problem.rotary) else {
        return rows;
    };
    let ([batch, len, heads, width], pairs) = (problem.x_shape(), problem.width / 2);
    let positions = Slice::from(rotary.start..rotary.start + len);
    let table = B::float_slice(table, &[positions, Slice::full(), Slice::full()]);
    // Both features of a pair share its angle.
    let table = B::float_reshape(table, Shape::new([len, 1, pairs, 4]));
    let angle = |n: usize| {
        let mut slices = vec![Slice::full(); 4];
        slices[3] = Slice::from(n..n + 1);
        let part = B::float_slice(table.clone(), &slices);
        B::float_reshape(part, Shape::new([1, len, 1, pairs, 1]))
    };
    let (cos, sin) = (angle(0), angle(1));
    let sin = if back { B::float_neg(sin) } else { sin };
    let rows = B::float_reshape(rows, Shape::new([batch, len, heads, pairs, 2]));
    let feature = |n: usize| {
        let mut slices = vec![Slice::full(); 5];
        slices[4] = Slice::from(n..n + 1);
        B::float_slice(rows.clone(), &slices)
    };
    let (a, b) = (feature(0), feature(1));
    let product = B::float_mul;
    let turned = vec![
        B::float_sub(
            product(a.clone(), cos.clone()),
            product(b.clone(), sin.clone()),
        ),
        B::float_add(product(b, cos), product(a, sin)),
    ];
    let turned = B::float_cat(turned, 4);
    B::float_reshape(turned, Shape::new([batch, len, heads, width]))
}

/// Sum over all rows, `[width]`: first over equal parts of the rows, then over the parts. In a single stage a GPU's
/// reduction would give each sum to one thread.
fn sum_rows<B: Backend>(values: FloatTensor<B>, problem: &NormProblem) -> FloatTensor<B> {
    let (rows, width) = (problem.row_count(), problem.width);
    let values = B::float_reshape(values, Shape::new([rows, width]));
    let parts = rows.min(PARTS);
    let (each, rest) = (rows / parts, rows % parts);
    let section = |from: usize, to: usize| {
        B::float_slice(values.clone(), &[Slice::from(from..to), Slice::full()])
    };
    let whole = B::float_reshape(section(0, parts * each), Shape::new([parts, each, width]));
    let mut sums = B::float_reshape(B::float_sum_dim(whole, 1), Shape::new([parts, width]));
    if rest > 0 {
        sums = B::float_cat(vec![sums, section(parts * each, rows)], 0);
    }
    B::float_reshape(B::float_sum_dim(sums, 0), Shape::new([width]))
}
