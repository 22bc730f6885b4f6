//! Embeddings whose gradient is summed in f32.

use crate::ops::TrainingOps;
use burn::backend::Dispatch;
use burn::nn::Embedding;
use burn::tensor::{DType, FloatDType, Int, Tensor};

/// The rows of an embedding for `tokens` `[batch, len]`, `[batch, len, d_model]` in `dtype`: [`Embedding::forward`],
/// and a cast.
///
/// The gradient of the table is summed in f32 and rounded to the table's type once. Burn's own adds token by token in
/// the type of the activations, where a sum in bf16 stops growing at 256 times a term, by one thread per column.
///
/// Up to 1024 rows the gradient is a product of one-hot rows, 128 MiB of them at a time, with that of the output: the same
/// in every run, and one that is not finite reaches all rows. Beyond, it is made by additions at indices, in memory that
/// does not depend on the vocabulary, and on a GPU atomic, so that the last bits differ from run to run.
///
/// # Panics
///
/// As [`Embedding::forward`] does: a token that is not below the size of the vocabulary is the backend's to refuse.
#[must_use]
pub fn embed(embedding: &Embedding, tokens: Tensor<2, Int>, dtype: FloatDType) -> Tensor<3> {
    let [batch, len] = tokens.dims();
    let weight = embedding.weight.val();
    let [_, width] = weight.dims();
    if batch * len == 0 {
        // Burn's `reshape` reads a 0 as "keep the axis".
        return Tensor::zeros([batch, len, width], (&weight.device(), DType::from(dtype)));
    }
    let tokens = tokens.flatten::<1>(0, 1).into_dispatch();
    let rows = Dispatch::training_lookup(weight.into_dispatch(), tokens, dtype);
    Tensor::<2>::from_dispatch(rows).reshape([batch, len, width])
}
