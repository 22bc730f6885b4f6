//! Attention of more tokens than a decode step takes, as a forward pass over the cache's keys.

use crate::ops::attention::DynamicMaskOps;
use crate::types::{OptionalFloat, PageMap, PageTensors, RankLearning, Selection, Wanted};
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{FloatDType, Shape, Slice, TensorData};
use flash_dma_problem::{AppendProblem, AttentionOptions, CacheShape, KeptKeys, Problem};

/// Causal attention of new queries whose keys are already in the pages, sequence by sequence.
pub(super) fn attend_pages<B: DynamicMaskOps>(
    q: FloatTensor<B>,
    pages: &PageTensors<B>,
    map: &PageMap,
    problem: &AppendProblem,
    options: &AttentionOptions,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let device = q.device();
    let [_, q_heads, tokens, dim] = q.shape().dims();
    let [_, heads, page_len, _] = problem.cache.kv_shape();
    if map.lengths.is_empty() {
        let lse = Shape::new([0, q_heads, tokens]);
        return (q, B::float_zeros(lse, &device, FloatDType::F32));
    }
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for (batch, &held) in map.lengths.iter().enumerate() {
        let len = held + problem.tokens;
        let used = &map.table[batch][..len.div_ceil(page_len)];
        let indices = B::int_from_data(TensorData::from(used), &device);
        let gather = |pool: &FloatTensor<B>, width: &[usize]| {
            let rows = B::float_select(pool.clone(), 0, indices.clone());
            let rows = B::float_swap_dims(rows, 0, 1);
            let mut shape = vec![1, heads, used.len() * page_len];
            shape.extend(width);
            let rows = B::float_reshape(rows, Shape::from(shape));
            B::float_slice(rows, &[Slice::full(), Slice::full(), (0..len).into()])
        };
        let (k, v) = (gather(&pages.k, &[dim]), gather(&pages.v, &[dim]));
        let window = problem.cache.page_window();
        let scores = match (&pages.scores, window) {
            (OptionalFloat::Some(pool), _) => Some(gather(pool, &[])),
            // A window needs scores; scores of 0 add nothing.
            (OptionalFloat::None, Some(_)) => {
                let shape = Shape::new([1, heads, len]);
                Some(B::float_zeros(shape, &device, FloatDType::F32))
            }
            (OptionalFloat::None, None) => None,
        };
        let (selection, options) = match scores {
            None => (Selection::All, *options),
            Some(scores) => {
                let kept = window.map_or(usize::MAX.into(), |recent| KeptKeys { best: 0, recent });
                let intervals = B::dynamic_mask_select(scores.clone(), kept);
                let selection = Selection::Scored {
                    scores,
                    intervals,
                    learning: RankLearning::None,
                };
                let window = window.unwrap_or(usize::MAX);
                (selection, options.with_keep_window(window))
            }
        };
        let q = B::float_slice(q.clone(), &[Slice::from(batch..batch + 1)]);
        let shape = [1, q_heads, tokens, dim];
        let one = forward_problem(&problem.cache, shape, len, &options);
        let results = B::dynamic_mask_forward(q, k, v, selection, one, Wanted::Out);
        outs.push(results.out);
        lses.push(results.lse);
    }
    (B::float_cat(outs, 0), B::float_cat(lses, 0))
}

/// Problem of attention over `len` keys per head, the last of which belong to the queries.
pub(super) fn forward_problem(
    cache: &CacheShape,
    q: [usize; 4],
    len: usize,
    options: &AttentionOptions,
) -> Problem {
    let kv = [q[0], cache.kv_heads, len, cache.head_dim];
    let scores = options.keep_window.map(|_| &kv[..3]);
    Problem::new(&q, &kv, &kv, scores, cache.element, options)
        .unwrap_or_else(|error| panic!("{error}"))
}
