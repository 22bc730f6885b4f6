//! Documents packed into sequences.

use super::composition::Layout;
use burn::tensor::{Device, Int, Tensor};
use flash_dma_problem::AttentionError;
use std::sync::{Arc, OnceLock};

/// The lengths of the documents that are packed into each sequence of a batch.
///
/// A token attends to its own document only, under the rule of the [`Selector`](crate::Selector) that has been given the
/// documents: its recent keys and sinks are those of the document.
///
/// ```
/// use burn_flash_dma::Documents;
///
/// // Two sequences of ten tokens, and the same first sequence by cumulative lengths.
/// let documents = Documents::from_lengths([vec![3, 7], vec![10]]);
/// assert_eq!(documents.lengths()[0], [3, 7]);
/// let packed = Documents::try_from_cu_seqlens(&[0, 3, 10])?;
/// assert_eq!(packed.lengths(), [vec![3, 7]]);
/// # Ok::<(), burn_flash_dma::AttentionError>(())
/// ```
///
/// If the lengths differ, the first selection puts a few integers per token on its device; clones share them, so make
/// one value per batch and clone it for every layer.
#[derive(Clone, Debug)]
pub struct Documents {
    lengths: Arc<[Vec<usize>]>,
    layout: Arc<OnceLock<Layout>>,
}

impl PartialEq for Documents {
    fn eq(&self, other: &Self) -> bool {
        self.lengths == other.lengths
    }
}

impl Eq for Documents {}

/// Where a document lies in its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) sequence: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Documents {
    /// The lengths of each sequence's documents, in order. That they add up to the length of the sequence is checked
    /// where the scores are known. A document may be empty.
    #[must_use]
    pub fn from_lengths(lengths: impl IntoIterator<Item = Vec<usize>>) -> Self {
        Self {
            lengths: lengths.into_iter().collect(),
            layout: Arc::default(),
        }
    }

    /// The documents of a single sequence by the cumulative lengths of FlashAttention's interface: document `d` has the
    /// tokens `cu_seqlens[d] .. cu_seqlens[d + 1]`.
    ///
    /// # Errors
    ///
    /// [`AttentionError::CumulativeLengths`] if they do not begin with 0 or if they fall.
    pub fn try_from_cu_seqlens(cu_seqlens: &[usize]) -> Result<Self, AttentionError> {
        if cu_seqlens.first() != Some(&0) {
            return Err(AttentionError::CumulativeLengths { index: 0 });
        }
        let falls = cu_seqlens.windows(2).position(|pair| pair[1] < pair[0]);
        if let Some(before) = falls {
            return Err(AttentionError::CumulativeLengths { index: before + 1 });
        }
        let lengths = cu_seqlens.windows(2).map(|pair| pair[1] - pair[0]);
        Ok(Self::from_lengths([lengths.collect()]))
    }

    /// The documents by the document of each token, `[batch, k_len]` of any integer type. A document is a run of equal
    /// ids: an id that comes back after another one begins a further document. Reads the tensor to the host, once.
    ///
    /// # Panics
    ///
    /// If the device fails to read the tensor.
    #[must_use]
    pub fn from_ids(ids: Tensor<2, Int>) -> Self {
        let [batch, k_len] = ids.dims();
        let ids = ids.into_data_as::<i64>();
        let ids: Vec<i64> = ids.iter::<i64>().collect();
        let runs = |row: usize| {
            let tokens = &ids[row * k_len..(row + 1) * k_len];
            tokens.chunk_by(|a, b| a == b).map(<[i64]>::len).collect()
        };
        Self::from_lengths((0..batch).map(runs))
    }

    /// The lengths of each sequence's documents.
    #[must_use]
    pub fn lengths(&self) -> &[Vec<usize>] {
        &self.lengths
    }

    /// Every document that holds a token.
    pub(crate) fn all(&self) -> impl Iterator<Item = Document> {
        self.lengths
            .iter()
            .enumerate()
            .flat_map(|(sequence, lengths)| {
                let mut start = 0;
                lengths.iter().map(move |&len| {
                    start += len;
                    Document {
                        sequence,
                        start: start - len,
                        len,
                    }
                })
            })
            .filter(|document| document.len > 0)
    }

    /// The length of every document, if they are equally long.
    pub(crate) fn equal(&self) -> Option<usize> {
        let mut all = self.all();
        let len = all.next()?.len;
        all.all(|document| document.len == len).then_some(len)
    }

    /// The documents of checked sequences on a device: those of the first device are kept.
    pub(crate) fn layout(&self, device: &Device) -> Layout {
        let kept = self.layout.get_or_init(|| Layout::new(self, device));
        if kept.device == *device {
            kept.clone()
        } else {
            Layout::new(self, device)
        }
    }

    /// Checks the sequences against the scores, `[batch, kv_heads, k_len]`.
    pub(crate) fn check(&self, [batch, _, k_len]: [usize; 3]) -> Result<(), AttentionError> {
        if self.lengths.len() != batch {
            return Err(AttentionError::DocumentBatch {
                documents: self.lengths.len(),
                batch,
            });
        }
        for (sequence, lengths) in self.lengths.iter().enumerate() {
            let tokens = lengths.iter().fold(0usize, |sum, &n| sum.saturating_add(n));
            if tokens != k_len {
                return Err(AttentionError::DocumentTokens {
                    sequence,
                    tokens,
                    k_len,
                });
            }
        }
        Ok(())
    }
}
