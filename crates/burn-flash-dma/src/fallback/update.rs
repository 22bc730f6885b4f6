//! An optimiser's update: the operations [`TrainingOps`](crate::ops::TrainingOps) has for it.

use super::tensors::{cast, to_f32};
use crate::types::FloatList;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape};
use flash_dma_problem::{AdamWStep, SQUARE_SUMS};

/// See [`TrainingOps::training_add_squares`](crate::ops::TrainingOps::training_add_squares).
pub fn add_squares<B: Backend>(sums: FloatTensor<B>, xs: FloatList<B>) -> FloatTensor<B> {
    xs.0.into_iter().fold(sums, add_squares_of::<B>)
}

fn add_squares_of<B: Backend>(sums: FloatTensor<B>, x: FloatTensor<B>) -> FloatTensor<B> {
    let (count, device) = (x.shape().num_elements(), x.device());
    if count == 0 {
        return sums;
    }
    let columns = count.div_ceil(SQUARE_SUMS);
    let missing = columns * SQUARE_SUMS - count;
    let mut row = B::float_reshape(to_f32::<B>(x), Shape::new([count]));
    if missing > 0 {
        let zeros = B::float_zeros(Shape::new([missing]), &device, FloatDType::F32);
        row = B::float_cat(vec![row, zeros], 0);
    }
    let rows = B::float_reshape(row, Shape::new([SQUARE_SUMS, columns]));
    let squares = B::float_mul(rows.clone(), rows);
    let more = B::float_sum_dim(squares, 1);
    B::float_add(sums, B::float_reshape(more, Shape::new([SQUARE_SUMS])))
}

/// See [`TrainingOps::training_scale`](crate::ops::TrainingOps::training_scale).
pub fn scale<B: Backend>(x: FloatTensor<B>, factor: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = x.dtype();
    cast::<B>(scaled::<B>(x, factor), dtype.into())
}

/// `x * factor`, of a 16-bit type in f32.
fn scaled<B: Backend>(x: FloatTensor<B>, factor: FloatTensor<B>) -> FloatTensor<B> {
    let rank = x.shape().num_dims();
    let x = wide::<B>(x);
    let factor = B::float_cast(factor, x.dtype().into());
    B::float_mul(x, B::float_reshape(factor, vec![1; rank].into()))
}

/// See [`TrainingOps::training_adamw`](crate::ops::TrainingOps::training_adamw).
pub fn adamw<B: Backend>(
    lists: [FloatList<B>; 4],
    factor: FloatTensor<B>,
    step: AdamWStep,
) -> [FloatList<B>; 3] {
    let [parameters, gradients, moments_1, moments_2] = lists.map(|list| list.0.into_iter());
    let mut new = [(); 3].map(|()| FloatList(Vec::new()));
    let moments = moments_1.zip(moments_2);
    for ((parameter, gradient), (moment_1, moment_2)) in parameters.zip(gradients).zip(moments) {
        let gradient = scaled::<B>(gradient, factor.clone());
        let results = adamw_of::<B>(parameter, gradient, [moment_1, moment_2], step);
        for (list, result) in new.iter_mut().zip(results) {
            list.0.push(result);
        }
    }
    new
}

/// Of a gradient that is wide.
fn adamw_of<B: Backend>(
    parameter: FloatTensor<B>,
    gradient: FloatTensor<B>,
    moments: [FloatTensor<B>; 2],
    step: AdamWStep,
) -> [FloatTensor<B>; 3] {
    let dtype = parameter.dtype();
    let parameter = wide::<B>(parameter);
    let [moment_1, moment_2] = moments.map(wide::<B>);
    let times = |x: FloatTensor<B>, factor: f64| B::float_mul_scalar(x, factor.into());
    let [beta_1, beta_2] = [step.beta_1, step.beta_2].map(f64::from);
    let [correction_1, correction_2] = step.corrections().map(f64::from);
    let moment_1 = B::float_add(
        times(moment_1, beta_1),
        times(gradient.clone(), 1.0 - beta_1),
    );
    let square = B::float_mul(gradient.clone(), gradient);
    let moment_2 = B::float_add(times(moment_2, beta_2), times(square, 1.0 - beta_2));
    let root = B::float_sqrt(B::float_div_scalar(moment_2.clone(), correction_2.into()));
    let root = B::float_add_scalar(root, f64::from(step.epsilon).into());
    let change = B::float_div(
        B::float_div_scalar(moment_1.clone(), correction_1.into()),
        root,
    );
    let decayed = times(parameter, step.decay());
    let parameter = B::float_sub(decayed, times(change, step.rate));
    [parameter, moment_1, moment_2].map(|x| cast::<B>(x, dtype.into()))
}

/// 16-bit types in f32.
fn wide<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    match x.dtype() {
        DType::F16 | DType::BF16 => to_f32::<B>(x),
        _ => x,
    }
}
