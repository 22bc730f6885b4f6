//! Documents of different lengths, as buckets of equal ones.

use crate::fallback::tensors::ints;
use burn::tensor::{Device, Int, Tensor};
use std::collections::BTreeMap;

/// Where a document lies in its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) sequence: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
    /// No document, but the padding behind them.
    pub(crate) is_padding: bool,
}

/// Documents of different lengths on a device, padded with hidden keys into buckets of equal length that are selected
/// at once: at most twice as many keys in all.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) device: Device,
    pub(crate) buckets: Vec<Bucket>,
    /// For each token of the batch, its place in the buckets.
    pub(crate) places: Tensor<1, Int>,
    /// First position of each token's document, `[batch, 1, k_len, 1]`.
    pub(crate) start: Tensor<4, Int>,
    /// End of each token's document, `[batch, 1, k_len, 1]`.
    pub(crate) end: Tensor<4, Int>,
}

#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    pub(crate) documents: usize,
    /// Keys per document, hidden ones included.
    pub(crate) padded: usize,
    /// `[documents * padded]`: index of the token in the batch, one past the last for a hidden key.
    pub(crate) tokens: Tensor<1, Int>,
}

impl Layout {
    /// The layout of the `documents` of `batch` sequences of equal lengths, padding included.
    pub(crate) fn new(batch: usize, documents: &[Document], device: &Device) -> Self {
        let k_len = documents.iter().map(|document| document.len).sum::<usize>() / batch.max(1);
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
            let repeated = |document: &Document| vec![number(*document) as i32; document.len];
            let values = documents.iter().flat_map(repeated).collect();
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
}

/// The documents by padded length, a power of two. Buckets of short documents join the next one while all buckets
/// together have at most twice the tokens.
fn buckets(documents: &[Document], tokens: usize) -> Vec<(usize, Vec<Document>)> {
    let mut by_len: BTreeMap<usize, Vec<Document>> = BTreeMap::new();
    for &document in documents {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Documents;

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
            let documents: Vec<_> = Documents::from_lengths([lengths.clone()]).all().collect();
            let buckets = buckets(&documents, tokens);
            let padded: usize = buckets.iter().map(|(len, bucket)| len * bucket.len()).sum();
            assert!(padded <= 2 * tokens, "{lengths:?}: {padded}");
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (len, bucket) in &buckets {
                assert!(bucket.iter().all(|document| document.len <= *len));
                held.extend(bucket.iter().map(|document| (document.start, document.len)));
            }
            held.sort_unstable();
            let all: Vec<_> = documents.iter().map(|d| (d.start, d.len)).collect();
            assert_eq!(held, all, "{lengths:?}");
        }
        // Short documents join the long ones, where they cost little.
        let documents: Vec<_> = Documents::from_lengths([vec![1000, 1, 2, 3]])
            .all()
            .collect();
        assert_eq!(buckets(&documents, 1006).len(), 2);
    }
}
