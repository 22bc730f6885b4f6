//! Embeddings whose gradient is summed in f32.

use crate::ops::TrainingOps;
use burn::backend::Dispatch;
use burn::nn::Embedding;
use burn::tensor::{DType, FloatDType, Int, Tensor};

/// Embeds `tokens` `[batch, len]` as `[batch, len, d_model]` in `dtype`: [`Embedding::forward`] and a cast.
///
/// The gradient of the table is summed in f32 and rounded to the table's type once. Burn's own adds token by token in
/// the type of the activations, where a bf16 sum stops growing at 256 times a term, by one thread per column.
///
/// With up to 1024 rows, the gradient is a product of one-hot rows (128 MiB of them at a time) with the output's
/// gradient: identical in every run, but a value that is not finite reaches all rows. With more rows it is added at
/// indices, in memory that does not depend on the vocabulary; on a GPU the additions are atomic, so the last bits
/// differ from run to run.
///
/// # Panics
///
/// Like [`Embedding::forward`]: the backend refuses a token that is not below the size of the vocabulary.
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
