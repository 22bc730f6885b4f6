//! The mask of dropout, as a tensor of pairs.

use crate::fallback::tensors::bool_dtype;
use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{FloatDType, Shape, TensorData};
use flash_dma_problem::dropout::{column_word, row_word};
use flash_dma_problem::{Dropout, Problem};

/// A tensor of the pairs of a problem, `[batch, kv_heads, group * q_len, k_len]`, f32, times the factors of their
/// probabilities; the tensor itself without dropout.
pub(super) fn dropped<B: Backend>(
    values: FloatTensor<B>,
    problem: &Problem,
    device: &B::Device,
) -> FloatTensor<B> {
    match weights::<B>(problem, device) {
        None => values,
        Some(weights) => B::float_mul(values, weights),
    }
}

/// The factors of all probabilities. The words of rows and columns are made on the host, those of pairs on the device:
/// in signed integers of 64 bits, which hold every product of a word and half of another.
fn weights<B: Backend>(p: &Problem, device: &B::Device) -> Option<FloatTensor<B>> {
    let mask = p.dropout.map(Dropout::mask)?;
    let pairs = Shape::new([p.batch, p.kv_heads, p.group() * p.q_len, p.k_len]);
    let heads = (0..p.batch * p.q_heads).map(|head| mask.head_word(head));
    let rows = heads.flat_map(|head| {
        (0..p.q_len).map(move |query| i64::from(row_word(head, p.dropout_position(query))))
    });
    let columns = (0..p.k_len).map(|key| column_word(mask.columns, key as u32));
    let (lower, upper): (Vec<_>, Vec<_>) = columns
        .map(|word| (i64::from(word & 0xffff), i64::from(word >> 16)))
        .unzip();
    let rows = TensorData::new(
        rows.collect(),
        [p.batch, p.kv_heads, p.group() * p.q_len, 1],
    );
    let [lower, upper] = [lower, upper].map(|halves| TensorData::new(halves, [1, 1, 1, p.k_len]));
    let [rows, lower, upper] = [rows, lower, upper]
        .map(|words| B::int_expand(B::int_from_data(words, device), pairs.clone()));
    // row * (2^16 upper + lower) modulo 2^32.
    let upper = B::int_mul(rows.clone(), upper);
    let upper = B::bitwise_and_scalar(upper, 0xffff.into());
    let upper = B::bitwise_left_shift_scalar(upper, 16.into());
    let words = B::int_add(B::int_mul(rows, lower), upper);
    let words = B::bitwise_and_scalar(words, i64::from(u32::MAX).into());
    let threshold = i64::from(mask.threshold);
    let dropped = B::int_lower_elem(words, threshold.into(), bool_dtype::<B>(device));
    let weights = B::float_full(pairs, mask.factor.into(), device, FloatDType::F32);
    Some(B::float_mask_fill(weights, dropped, 0.0f32.into()))
}
