//! Documents packed into sequences.

pub(crate) mod layout;

use self::layout::{Document, Layout};
use crate::validate::at_most;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use flash_dma_problem::AttentionError;
use std::sync::{Arc, OnceLock};

/// The lengths of the documents that are packed into each sequence of a batch, or of sequences that are padded to one
/// length ([`try_from_padded`](Self::try_from_padded)).
///
/// A token attends to its own document only, whose recent keys and sinks are those of a [`Selector`](crate::Selector). No
/// query attends to padding, and the output of a padding query is zero.
///
/// ```
/// use burn_flash_dma::Documents;
///
/// // Two sequences of ten tokens, and the same first sequence by cumulative lengths.
/// let documents = Documents::from_lengths([vec![3, 7], vec![10]]);
/// assert_eq!(documents.lengths()[0], [3, 7]);
/// let packed = Documents::try_from_cu_seqlens(&[0, 3, 10])?;
/// assert_eq!(packed.lengths(), [vec![3, 7]]);
/// // Two sequences of a batch of length 10; the second has three tokens of padding.
/// let padded = Documents::try_from_padded([10, 7], 10)?;
/// assert_eq!(padded.lengths(), [vec![10], vec![7]]);
/// # Ok::<(), burn_flash_dma::AttentionError>(())
/// ```
///
/// The first call puts a few integers per token on its device; clones share them, so make one value per batch and clone
/// it for every layer.
#[derive(Clone, Debug)]
pub struct Documents {
    lengths: Arc<[Vec<usize>]>,
    /// Tokens behind the documents of each sequence that belong to none of them.
    padding: Arc<[usize]>,
    layout: Kept<Layout>,
    /// First and end of the intervals of all keys of a document, `[batch, 1, k_len, 2]`.
    pub(crate) whole: Kept<Tensor<4, Int>>,
    /// Which tokens are padding, `[batch, 1, k_len]`.
    is_padding: Kept<Tensor<3, Bool>>,
}

/// A value made once, on the first device that asks for it.
#[derive(Clone, Debug)]
pub(crate) struct Kept<T>(Arc<OnceLock<(Device, T)>>);

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Clone> Kept<T> {
    pub(crate) fn on(&self, device: &Device, make: impl Fn() -> T) -> T {
        let (kept, made) = self.0.get_or_init(|| (device.clone(), make()));
        if kept == device { made.clone() } else { make() }
    }
}

impl PartialEq for Documents {
    fn eq(&self, other: &Self) -> bool {
        self.lengths == other.lengths && self.padding == other.padding
    }
}

impl Eq for Documents {}

impl Documents {
    /// The lengths of each sequence's documents, in order. That they add up to the length of the sequence is checked
    /// where the scores are known. A document may be empty.
    #[must_use]
    pub fn from_lengths(lengths: impl IntoIterator<Item = Vec<usize>>) -> Self {
        let lengths: Arc<[Vec<usize>]> = lengths.into_iter().collect();
        let padding = vec![0; lengths.len()].into();
        Self::new(lengths, padding)
    }

    fn new(lengths: Arc<[Vec<usize>]>, padding: Arc<[usize]>) -> Self {
        Self {
            lengths,
            padding,
            layout: Kept::default(),
            whole: Kept::default(),
            is_padding: Kept::default(),
        }
    }

    /// Sequences of these lengths, each one document, padded to `len` tokens.
    ///
    /// # Errors
    ///
    /// [`AttentionError::TooLarge`] if one of them is longer than `len`.
    pub fn try_from_padded(
        lengths: impl IntoIterator<Item = usize>,
        len: usize,
    ) -> Result<Self, AttentionError> {
        let lengths: Vec<usize> = lengths.into_iter().collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        at_most("the length of a sequence", longest, len)?;
        let padding = lengths.iter().map(|own| len - own).collect();
        let documents = lengths.into_iter().map(|own| vec![own]);
        Ok(Self::new(documents.collect(), padding))
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

    /// The documents by the id of each token's, `[batch, k_len]` of any integer type: a document is a run of equal ids.
    /// Reads the tensor to the host, once.
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

    /// The lengths of each sequence's documents, without the padding.
    #[must_use]
    pub fn lengths(&self) -> &[Vec<usize>] {
        &self.lengths
    }

    /// True if tokens behind the documents of a sequence belong to none.
    #[cfg(feature = "autodiff")]
    pub(crate) fn has_padding(&self) -> bool {
        self.padding.iter().any(|&tokens| tokens > 0)
    }

    /// The length of the longest document, at least 1.
    pub(crate) fn longest(&self) -> usize {
        let lengths = self.lengths.iter().flatten().copied();
        lengths.max().unwrap_or(0).max(1)
    }

    /// The tokens of the first sequence, padding included.
    pub(crate) fn tokens(&self) -> usize {
        let padding = self.padding.first().copied().unwrap_or(0);
        let own = self.lengths.first().into_iter().flatten();
        own.fold(padding, |sum, &n| sum.saturating_add(n))
    }

    /// Which tokens of checked sequences are padding, `[batch, 1, k_len]`; `None` if there is none.
    pub(crate) fn padded(&self, k_len: usize, device: &Device) -> Option<Tensor<3, Bool>> {
        if self.padding.iter().all(|&tokens| tokens == 0) {
            return None;
        }
        Some(self.is_padding.on(device, || {
            let tokens = self.padding.iter();
            let row = |&own: &usize| (0..k_len).map(move |token| token >= k_len - own);
            let shape = [self.padding.len(), 1, k_len];
            let values: Vec<bool> = tokens.flat_map(row).collect();
            Tensor::from_data(TensorData::new(values, shape), device)
        }))
    }

    /// Every document that holds a token, the padding of a sequence as one more.
    pub(crate) fn all(&self) -> impl Iterator<Item = Document> {
        let sequences = self.lengths.iter().zip(self.padding.iter()).enumerate();
        let all = sequences.flat_map(|(sequence, (lengths, padding))| {
            let mut start = 0;
            let all = lengths.iter().chain([padding]).enumerate();
            all.map(move |(nth, &len)| {
                start += len;
                Document {
                    sequence,
                    start: start - len,
                    len,
                    is_padding: nth == lengths.len(),
                }
            })
        });
        all.filter(|document| document.len > 0)
    }

    /// The length of every document, if they are equally long.
    pub(crate) fn equal(&self) -> Option<usize> {
        let mut all = self.all();
        let len = all.next()?.len;
        all.all(|document| document.len == len).then_some(len)
    }

    /// The documents of checked sequences on a device.
    pub(crate) fn layout(&self, device: &Device) -> Layout {
        self.layout.on(device, || {
            let documents: Vec<_> = self.all().collect();
            Layout::new(self.lengths.len(), &documents, device)
        })
    }

    /// Checks the sequences against the scores, `[batch, kv_heads, k_len]`, or queries instead of keys.
    pub(crate) fn check(&self, [batch, _, k_len]: [usize; 3]) -> Result<(), AttentionError> {
        if self.lengths.len() != batch {
            return Err(AttentionError::DocumentBatch {
                documents: self.lengths.len(),
                batch,
            });
        }
        for (sequence, lengths) in self.lengths.iter().enumerate() {
            let tokens = lengths.iter().fold(0usize, |sum, &n| sum.saturating_add(n));
            let tokens = tokens.saturating_add(self.padding[sequence]);
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
