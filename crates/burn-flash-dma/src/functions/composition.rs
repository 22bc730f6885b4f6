//! One selection rule for a batch of scores, in plain tensor operations around the engines' selection.

use crate::documents::Documents;
use crate::documents::layout::{Bucket, Layout};
use crate::fallback::running::arange;
use crate::fallback::tensors::ints;
use crate::ops::attention::DynamicMaskOps;
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};
use flash_dma_problem::SelectionRule;

/// The intervals of scores `[batch, kv_heads, k_len]` (f32) under a checked rule, `[batch, kv_heads, k_len, 2]` i32.
pub(crate) fn compose(
    scores: Tensor<3>,
    rule: SelectionRule,
    documents: Option<&Documents>,
) -> Tensor<4, Int> {
    let [batch, heads, k_len] = scores.dims();
    let device = scores.device();
    if batch * heads * k_len == 0 {
        return Tensor::zeros([batch, heads, k_len, 2], (&device, DType::I32));
    }
    let scores = match documents.and_then(|documents| documents.padded(k_len, &device)) {
        None => scores,
        Some(padding) => scores.mask_fill(padding.expand([batch, heads, k_len]), f32::NEG_INFINITY),
    };
    let documents = documents.filter(|documents| documents.equal() != Some(k_len));
    let Some(documents) = documents else {
        return select_rows(scores, rule);
    };
    match documents.equal() {
        Some(len) => {
            let count = k_len / len;
            let rows = select_rows(scores.reshape([batch, heads * count, len]), rule);
            let rows = rows.reshape([batch, heads, count, len, 2]);
            let starts = (0..count).map(|document| (document * len) as i32);
            let starts = ints(starts.collect(), [1, 1, count, 1, 1], &device);
            (rows + starts).reshape([batch, heads, k_len, 2])
        }
        None => {
            let layout = documents.layout(&device);
            let selected = layout.select(scores, rule) + layout.start;
            selected.min_pair(layout.end.expand([batch, heads, k_len, 2]))
        }
    }
}

/// First position at which its rank keeps each key of scores `[batch, kv_heads, k_len]`, the same shape, i32: where
/// it leaves the `recent` keys; past the last position for the first `sinks` keys of each document.
pub(crate) fn kept_by_rank_from(
    scores: &Tensor<3>,
    [recent, sinks]: [usize; 2],
    documents: Option<&Documents>,
) -> Tensor<3, Int> {
    let [batch, heads, k_len] = scores.dims();
    let device = scores.device();
    let options = (&device, DType::I32);
    if batch * heads * k_len == 0 {
        return Tensor::zeros([batch, heads, k_len], options);
    }
    let keys = arange(0..k_len as i64, options).reshape([1, 1, k_len]);
    let recent = recent.min(k_len) as i64;
    let from = keys.clone().add_scalar(recent);
    let documents = documents.filter(|documents| documents.equal() != Some(k_len));
    let from = match (sinks, documents) {
        (0, _) => from,
        (_, None) => from.mask_fill(keys.lower_elem(sinks.min(k_len) as i64), k_len as i64),
        (_, Some(documents)) => {
            let start = documents.layout(&device).start.reshape([batch, 1, k_len]);
            let sink = (keys - start).lower_elem(sinks.min(k_len) as i64);
            from.expand([batch, 1, k_len]).mask_fill(sink, k_len as i64)
        }
    };
    from.expand([batch, heads, k_len])
}

/// Selects in rows, `[rows, heads, len]`, each of which is a document of its own.
fn select_rows(scores: Tensor<3>, rule: SelectionRule) -> Tensor<4, Int> {
    let [rows, heads, len] = scores.dims();
    let ranks = if rule.sinks == 0 {
        scores
    } else {
        let sinks = rule.sinks.min(len);
        let first = scores.clone().narrow(2, 0, sinks);
        let shown = first.clone().not_equal_elem(f32::NEG_INFINITY);
        let first = first.mask_fill(shown, f32::INFINITY);
        scores.slice_assign([0..rows, 0..heads, 0..sinks], first)
    };
    let intervals = Dispatch::dynamic_mask_select(ranks.into_dispatch(), rule.kept());
    Tensor::from_dispatch(intervals)
}

impl Layout {
    /// Intervals of scores `[batch, kv_heads, k_len]`, in positions of each document; a key that is never evicted
    /// ends at or past the end of its document.
    fn select(&self, scores: Tensor<3>, rule: SelectionRule) -> Tensor<4, Int> {
        let [batch, heads, k_len] = scores.dims();
        let hidden = Tensor::full([heads, 1], f32::NEG_INFINITY, (&self.device, DType::F32));
        let scores = scores.swap_dims(0, 1).reshape([heads, batch * k_len]);
        let scores = Tensor::cat(vec![scores, hidden], 1);
        let of_bucket = |bucket: &Bucket| {
            let Bucket {
                documents, padded, ..
            } = *bucket;
            let rows = scores.clone().select(1, bucket.tokens.clone());
            let selected = select_rows(rows.reshape([heads, documents, padded]), rule);
            selected.reshape([heads, documents * padded, 2])
        };
        let selected = Tensor::cat(self.buckets.iter().map(of_bucket).collect(), 1);
        let selected = selected.select(1, self.places.clone());
        (selected.reshape([heads, batch, k_len, 2])).swap_dims(0, 1)
    }
}
