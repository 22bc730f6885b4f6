//! A training step's own operations: [`TrainingOps`](crate::ops::TrainingOps).

use super::tensors::{bool_dtype, cast, greatest_divisor, to_f32};
use crate::types::OptionalFloat;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Shape, Slice};

/// The largest vocabulary whose gradient is made by products with one-hot rows; larger ones add at indices.
pub(crate) const ONE_HOT_VOCABULARY: usize = 1024;

/// Maximum number of one-hot numbers at a time: 128 MiB in f32.
pub(crate) const ONE_HOT_NUMBERS: usize = 1 << 25;

/// Maximum number of rows of all partial sums together, each as wide as the embedding.
const PARTIAL_ROWS: usize = 1 << 14;

/// Minimum number of tokens for a partial sum to be worth its own product.
const SEGMENT: usize = 512;

/// See [`TrainingOps::training_lookup`](crate::ops::TrainingOps::training_lookup).
pub fn lookup<B: Backend>(
    weight: FloatTensor<B>,
    tokens: IntTensor<B>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let [vocabulary, _] = weight.shape().dims();
    let [count] = tokens.shape().dims();
    // Whichever is smaller is cast.
    if vocabulary < count {
        B::float_select(cast::<B>(weight, dtype), 0, tokens)
    } else {
        cast::<B>(B::float_select(weight, 0, tokens), dtype)
    }
}

/// Gradient of the table of [`lookup`], `[vocabulary, width]` in f32, from that of its rows, `[tokens, width]`.
///
/// A small vocabulary takes one-hotᵀ · gradient in f32, a product per segment of tokens and one sum over the
/// segments: identical in every run. A larger one adds at indices in f32: on a GPU atomically and in no fixed order.
pub fn lookup_gradient<B: Backend>(
    gradient: FloatTensor<B>,
    tokens: IntTensor<B>,
    vocabulary: usize,
) -> FloatTensor<B> {
    let [count, width] = gradient.shape().dims();
    let device = gradient.device();
    if count == 0 || vocabulary > ONE_HOT_VOCABULARY {
        let table = B::float_zeros([vocabulary, width].into(), &device, FloatDType::F32);
        if count == 0 {
            return table;
        }
        let rows = B::int_reshape(tokens, Shape::new([count, 1]));
        let rows = B::int_expand(rows, Shape::new([count, width]));
        return B::float_scatter(0, table, rows, to_f32::<B>(gradient), IndexingUpdateOp::Add);
    }
    // f32 products may run in TF32, which has more bits than bf16 and as many as f16: an f32 is three such numbers.
    let parts = match gradient.dtype() {
        DType::F32 => {
            let rounded = |x: FloatTensor<B>| to_f32::<B>(cast::<B>(x, FloatDType::BF16));
            let high = rounded(gradient.clone());
            let rest = B::float_sub(gradient, high.clone());
            let middle = rounded(rest.clone());
            let low = B::float_sub(rest, middle.clone());
            vec![low, middle, high]
        }
        _ => vec![to_f32::<B>(gradient)],
    };
    let (segments, chunk) = segments(count, vocabulary);
    let length = count / segments;
    let tokens = B::int_reshape(tokens, Shape::new([segments, 1, length]));
    let parts: Vec<_> = (parts.into_iter())
        .map(|part| B::float_reshape(part, Shape::new([segments, length, width])))
        .collect();
    let mut sum: Option<FloatTensor<B>> = None;
    for start in (0..segments).step_by(chunk) {
        let end = segments.min(start + chunk);
        let range = [Slice::from(start..end)];
        let tokens = B::int_slice(tokens.clone(), &range);
        let one_hot = one_hot::<B>(tokens, vocabulary, FloatDType::F32);
        for part in &parts {
            let product = B::float_matmul(one_hot.clone(), B::float_slice(part.clone(), &range));
            let product = B::float_sum_dim(product, 0);
            sum = Some(match sum {
                None => product,
                Some(sum) => B::float_add(sum, product),
            });
        }
    }
    let sum = sum.expect("there are tokens");
    B::float_reshape(sum, Shape::new([vocabulary, width]))
}

/// Number of equal segments of the tokens, and how many of them are multiplied at a time.
fn segments(tokens: usize, vocabulary: usize) -> (usize, usize) {
    let most = (PARTIAL_ROWS / vocabulary).min(tokens / SEGMENT).max(1);
    let segments = greatest_divisor(tokens, most);
    let chunk = ONE_HOT_NUMBERS / (tokens / segments * vocabulary);
    (segments, chunk.max(1))
}

/// One-hot rows `[segments, vocabulary, length]` of tokens `[segments, 1, length]`.
pub(crate) fn one_hot<B: Backend>(
    tokens: IntTensor<B>,
    vocabulary: usize,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let [segments, _, length] = tokens.shape().dims();
    let device = tokens.device();
    let shape = Shape::new([segments, vocabulary, length]);
    let classes = B::int_arange(0..vocabulary as i64, &device, tokens.dtype().into());
    let classes = B::int_reshape(classes, Shape::new([1, vocabulary, 1]));
    let hit = B::int_equal(
        B::int_expand(tokens, shape.clone()),
        B::int_expand(classes, shape),
        bool_dtype::<B>(&device),
    );
    B::bool_into_float(hit, dtype)
}

/// See [`TrainingOps::training_swiglu`](crate::ops::TrainingOps::training_swiglu).
pub fn swiglu<B: Backend>(gate: FloatTensor<B>, up: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = gate.dtype().into();
    let (gate, up) = (to_f32::<B>(gate), to_f32::<B>(up));
    let silu = B::float_mul(gate.clone(), B::sigmoid(gate));
    cast::<B>(B::float_mul(silu, up), dtype)
}

/// See [`TrainingOps::training_swiglu_backward`](crate::ops::TrainingOps::training_swiglu_backward).
pub fn swiglu_backward<B: Backend>(
    gate: FloatTensor<B>,
    up: FloatTensor<B>,
    gradient: FloatTensor<B>,
    again: bool,
) -> (FloatTensor<B>, FloatTensor<B>, OptionalFloat<B>) {
    let dtype = gate.dtype().into();
    let [gate, up, gradient] = [gate, up, gradient].map(to_f32::<B>);
    let sigmoid = B::sigmoid(gate.clone());
    let silu = B::float_mul(gate, sigmoid.clone());
    // sigmoid + silu (1 - sigmoid)
    let rest = B::float_sub(silu.clone(), B::float_mul(silu.clone(), sigmoid.clone()));
    let slope = B::float_add(sigmoid, rest);
    let of_gate = B::float_mul(B::float_mul(gradient.clone(), up.clone()), slope);
    let of_up = B::float_mul(gradient, silu.clone());
    let narrow = |x| cast::<B>(x, dtype);
    let result = again.then(|| narrow(B::float_mul(silu, up)));
    let result = OptionalFloat::from_option(result);
    (narrow(of_gate), narrow(of_up), result)
}

/// See [`TrainingOps::training_scores`](crate::ops::TrainingOps::training_scores).
pub fn scores<B: Backend>(tokens: FloatTensor<B>, directions: FloatTensor<B>) -> FloatTensor<B> {
    let [heads, width] = directions.shape().dims();
    let directions = B::float_reshape(directions, Shape::new([1, heads, width]));
    B::float_matmul(directions, B::float_swap_dims(to_f32::<B>(tokens), 1, 2))
}

/// See [`TrainingOps::training_scores_gradient`](crate::ops::TrainingOps::training_scores_gradient).
pub fn scores_gradient<B: Backend>(
    tokens: FloatTensor<B>,
    gradient: FloatTensor<B>,
) -> FloatTensor<B> {
    let ([_, heads, _], [_, _, width]) = (gradient.shape().dims(), tokens.shape().dims());
    let each = B::float_matmul(gradient, to_f32::<B>(tokens));
    B::float_reshape(B::float_sum_dim(each, 0), Shape::new([heads, width]))
}

/// Gradient of the tokens of [`scores`], in their shape and type.
pub fn scores_token_gradient<B: Backend>(
    tokens: &FloatTensor<B>,
    directions: FloatTensor<B>,
    gradient: FloatTensor<B>,
) -> FloatTensor<B> {
    let [heads, width] = directions.shape().dims();
    let directions = B::float_reshape(directions, Shape::new([1, heads, width]));
    let of_tokens = B::float_matmul(B::float_swap_dims(gradient, 1, 2), directions);
    cast::<B>(of_tokens, tokens.dtype().into())
}

/// See [`TrainingOps::training_split`](crate::ops::TrainingOps::training_split).
pub fn split<B: Backend>(x: FloatTensor<B>, dim: usize, sizes: &[usize]) -> Vec<FloatTensor<B>> {
    let mut start = 0;
    let part = |&size: &usize| {
        let mut slices = vec![Slice::full(); x.shape().num_dims()];
        slices[dim] = Slice::from(start..start + size);
        start += size;
        B::float_slice(x.clone(), &slices)
    };
    sizes.iter().map(part).collect()
}

/// See [`TrainingOps::training_losses_normalised`](crate::ops::TrainingOps::training_losses_normalised).
pub fn losses<B: Backend>(
    logits: FloatTensor<B>,
    targets: IntTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let [rows, _] = logits.shape().dims();
    let logits = cast::<B>(logits, FloatDType::F32);
    let greatest = B::float_max_dim(logits.clone(), 1);
    let hit = B::float_gather(
        1,
        logits.clone(),
        B::int_reshape(targets, Shape::new([rows, 1])),
    );
    let exponentials = B::float_exp(B::float_sub(logits, greatest.clone()));
    let log_sum = B::float_log(B::float_sum_dim(exponentials, 1));
    let losses = B::float_add(B::float_sub(greatest.clone(), hit), log_sum.clone());
    let losses = B::float_reshape(losses, Shape::new([rows]));
    (losses, B::float_cat(vec![greatest, log_sum], 1))
}

/// See [`TrainingOps::training_losses_gradient`](crate::ops::TrainingOps::training_losses_gradient).
pub fn losses_gradient<B: Backend>(
    logits: FloatTensor<B>,
    targets: IntTensor<B>,
    normaliser: FloatTensor<B>,
    gradient: FloatTensor<B>,
) -> FloatTensor<B> {
    let [rows, classes] = logits.shape().dims();
    if rows == 0 {
        return logits;
    }
    let dtype = logits.dtype().into();
    let part = |at| {
        B::float_slice(
            normaliser.clone(),
            &[Slice::full(), Slice::from(at..at + 1)],
        )
    };
    let shifted = B::float_sub(cast::<B>(logits, FloatDType::F32), part(0));
    let probabilities = B::float_exp(B::float_sub(shifted, part(1)));
    let targets = B::int_reshape(targets, Shape::new([rows, 1, 1]));
    let hit = one_hot::<B>(targets, classes, FloatDType::F32);
    let hit = B::float_reshape(hit, Shape::new([rows, classes]));
    let gradient = B::float_reshape(gradient, Shape::new([rows, 1]));
    cast::<B>(
        B::float_mul(B::float_sub(probabilities, hit), gradient),
        dtype,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_divide_the_tokens_and_chunks_fit_their_memory() {
        assert_eq!(segments(32768, 256), (64, 256));
        assert_eq!(segments(131_072, 1024), (16, 4));
        assert_eq!(segments(7919, 256), (1, 16));
        assert_eq!(segments(3 * 512, 256), (3, 256));
        assert_eq!(segments(10, 3), (1, 1_118_481));
        for (tokens, vocabulary) in [(40_000, 1000), (1 << 20, 1024), (12_345_678, 700)] {
            let (segments, chunk) = segments(tokens, vocabulary);
            assert_eq!(tokens % segments, 0);
            assert!(chunk == 1 || chunk * (tokens / segments) * vocabulary <= ONE_HOT_NUMBERS);
        }
    }
}
