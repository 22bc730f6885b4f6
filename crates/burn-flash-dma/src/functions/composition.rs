//! One selection rule for a batch of scores, in plain tensor operations around the engines' selection.

use super::documents::{Document, Documents};
use crate::ops::attention::DynamicMaskOps;
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use flash_dma_problem::SelectionRule;
use std::collections::BTreeMap;

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
    let keys = Tensor::<1, Int>::arange(0..k_len as i64, options).reshape([1, 1, k_len]);
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

/// Documents of different lengths on a device, padded with hidden keys into buckets of equal length that are selected
/// at once: at most twice as many keys in all.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) device: Device,
    buckets: Vec<Bucket>,
    /// For each token of the batch, its place in the buckets.
    places: Tensor<1, Int>,
    /// First position of each token's document, `[batch, 1, k_len, 1]`.
    start: Tensor<4, Int>,
    /// End of each token's document, `[batch, 1, k_len, 1]`.
    end: Tensor<4, Int>,
}

#[derive(Clone, Debug)]
struct Bucket {
    documents: usize,
    /// Keys per document, hidden ones included.
    padded: usize,
    /// `[documents * padded]`: index of the token in the batch, one past the last for a hidden key.
    tokens: Tensor<1, Int>,
}

impl Layout {
    pub(crate) fn new(documents: &Documents, device: &Device) -> Self {
        let batch = documents.lengths().len();
        let k_len = documents.all().map(|document| document.len).sum::<usize>() / batch.max(1);
        let tokens = batch * k_len;
        let mut places = vec![0i32; tokens];
        let mut place = 0;
        let mut made = Vec::new();
        for (padded, bucket) in buckets(documents, tokens) {
            let mut index = vec![tokens as i32; bucket.len() * padded];
            for (document, row) in bucket.iter().zip(index.chunks_mut(padded)) {
                let first = document.sequence * k_len + document.start;
                for (at, token) in row.iter_mut().enumerate().take(document.len) {
                    *token = (first + at) as i32;
                    places[first + at] = (place + at) as i32;
                }
                place += padded;
            }
            let len = index.len();
            made.push(Bucket {
                documents: bucket.len(),
                padded,
                tokens: ints(index, [len], device),
            });
        }
        let of_tokens = |number: fn(Document) -> usize| {
            let repeated = |document: Document| vec![number(document) as i32; document.len];
            let values = documents.all().flat_map(repeated).collect();
            ints(values, [batch, 1, k_len, 1], device)
        };
        Self {
            device: device.clone(),
            buckets: made,
            places: ints(places, [tokens], device),
            start: of_tokens(|document| document.start),
            end: of_tokens(|document| document.start + document.len),
        }
    }

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

/// The documents by padded length, a power of two. Buckets of short documents join the next one while all buckets
/// together have at most twice the tokens.
fn buckets(documents: &Documents, tokens: usize) -> Vec<(usize, Vec<Document>)> {
    let mut by_len: BTreeMap<usize, Vec<Document>> = BTreeMap::new();
    for document in documents.all() {
        let padded = document.len.next_power_of_two();
        by_len.entry(padded).or_default().push(document);
    }
    let mut total: usize = by_len.iter().map(|(len, bucket)| len * bucket.len()).sum();
    let mut joined: Vec<(usize, Vec<Document>)> = Vec::new();
    for (padded, mut bucket) in by_len {
        if let Some((len, shorter)) = joined.pop() {
            let more = (padded - len) * shorter.len();
            if total + more <= 2 * tokens {
                total += more;
                bucket.extend(shorter);
            } else {
                joined.push((len, shorter));
            }
        }
        joined.push((padded, bucket));
    }
    joined
}

pub(crate) fn ints<const D: usize>(
    values: Vec<i32>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_every_document_once_in_at_most_twice_the_tokens() {
        for lengths in [
            vec![1, 1, 1, 1, 1],
            vec![5, 700, 3, 65, 64, 1, 1, 33],
            vec![1000, 1, 2, 3],
            vec![0, 17, 0, 9],
            vec![513; 9],
        ] {
            let tokens = lengths.iter().sum();
            let documents = Documents::from_lengths([lengths.clone()]);
            let buckets = buckets(&documents, tokens);
            let padded: usize = buckets.iter().map(|(len, bucket)| len * bucket.len()).sum();
            assert!(padded <= 2 * tokens, "{lengths:?}: {padded}");
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (len, bucket) in &buckets {
                assert!(bucket.iter().all(|document| document.len <= *len));
                held.extend(bucket.iter().map(|document| (document.start, document.len)));
            }
            held.sort_unstable();
            let all: Vec<_> = documents.all().map(|d| (d.start, d.len)).collect();
            assert_eq!(held, all, "{lengths:?}");
        }
        // Short documents join the long ones, where they cost little.
        let documents = Documents::from_lengths([vec![1000, 1, 2, 3]]);
        assert_eq!(buckets(&documents, 1006).len(), 2);
    }
}
