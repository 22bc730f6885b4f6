//! What ALiBi adds to the logits, as a tensor of pairs.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Shape, TensorData};
use flash_dma_problem::Problem;

/// A tensor of the pairs of a problem, `[batch, kv_heads, group * q_len, k_len]`, f32, less the slopes of their heads
/// times their distances; the tensor itself without ALiBi.
pub(crate) fn biased<B: Backend>(
    logits: FloatTensor<B>,
    p: &Problem,
    device: &B::Device,
) -> FloatTensor<B> {
    let Some(slopes) = p.alibi else {
        return logits;
    };
    let pairs = Shape::new([1, p.kv_heads, p.group() * p.q_len, p.k_len]);
    let heads = slopes.values().iter();
    let slopes = heads.flat_map(|&slope| std::iter::repeat_n(slope, p.q_len));
    // Places count from the first key, and are exact: there is no room for 2^24 keys or queries here.
    let first = p.k_len as f32 - p.q_len as f32;
    let queries = (0..p.q_heads).flat_map(|_| (0..p.q_len).map(|query| first + query as f32));
    let rows = [1, p.kv_heads, p.group() * p.q_len, 1];
    let expanded = |values: Vec<f32>, shape| {
        let tensor = B::float_from_data(TensorData::new(values, shape), device);
        B::float_expand(tensor, pairs.clone())
    };
    let keys = (0..p.k_len).map(|key| key as f32).collect();
    let (queries, keys) = (
        expanded(queries.collect(), rows),
        expanded(keys, [1, 1, 1, p.k_len]),
    );
    let distances = B::float_abs(B::float_sub(queries, keys));
    let alibi = B::float_mul(expanded(slopes.collect(), rows), distances);
    B::float_sub(logits, alibi)
}
