//! Where sequences are cut into parts.

use crate::Documents;
use flash_dma_problem::AttentionError;
use std::ops::Range;

/// Where sequences are cut: into parts that are read one after the other ([`try_in_parts`](super::try_in_parts)), or each by a device
/// of its own ([`DeviceGroup`](super::DeviceGroup)).
#[derive(Clone, Debug)]
pub struct Parts {
    ranges: Vec<Range<usize>>,
    documents: Documents,
}

impl Parts {
    /// Parts of `part` tokens of each of `batch` sequences of `len` tokens; the last may be shorter.
    ///
    /// # Panics
    ///
    /// If one of them is 0.
    #[must_use]
    pub fn new(batch: usize, len: usize, part: usize) -> Self {
        let all = [batch, len, part];
        assert!(
            !all.contains(&0),
            "{batch} sequences of {len} tokens in parts of {part}"
        );
        let ranges = (0..len).step_by(part);
        let end = |start: usize| len.min(start.saturating_add(part));
        Self::of(batch, ranges.map(|start| start..end(start)).collect())
    }

    /// So many parts of each of `batch` sequences of `len` tokens, each as long as the others or a token longer.
    ///
    /// # Panics
    ///
    /// If there is no part or no sequence, or fewer tokens than parts.
    #[must_use]
    pub fn even(batch: usize, len: usize, parts: usize) -> Self {
        let lengths: Vec<_> = (0..parts).map(|part| (len + part) / parts).collect();
        Self::of_lengths(batch, &lengths)
    }

    /// Parts of these numbers of tokens, in this order, of each of `batch` sequences.
    ///
    /// # Panics
    ///
    /// If there is no part or no sequence, or a part has no token.
    #[must_use]
    pub fn of_lengths(batch: usize, lengths: &[usize]) -> Self {
        assert!(
            batch > 0 && !lengths.is_empty() && !lengths.contains(&0),
            "{batch} sequences in parts of {lengths:?} tokens"
        );
        let ends = lengths.iter().scan(0, |end, &len| {
            *end += len;
            Some(*end - len..*end)
        });
        Self::of(batch, ends.collect())
    }

    fn of(batch: usize, ranges: Vec<Range<usize>>) -> Self {
        let len = ranges.last().map_or(0, |range| range.end);
        Self {
            ranges,
            documents: Documents::from_lengths(vec![vec![len]; batch]),
        }
    }

    /// The documents that are packed into each sequence: any part may begin and end within one.
    ///
    /// # Errors
    ///
    /// [`AttentionError::DocumentBatch`] or [`AttentionError::DocumentTokens`] if they are not those of sequences of this number and
    /// length, [`AttentionError::Unsupported`] if there is padding behind them.
    pub fn try_with_documents(self, documents: Documents) -> Result<Self, AttentionError> {
        let batch = self.documents.lengths().len();
        documents.check([batch, 1, self.len()])?;
        if documents.has_padding() {
            let what = "padding in sequences that are read in parts".to_owned();
            return Err(AttentionError::Unsupported { what });
        }
        Ok(Self { documents, ..self })
    }

    /// Tokens of a sequence.
    pub(super) fn len(&self) -> usize {
        self.ranges.last().map_or(0, |range| range.end)
    }

    /// Tokens of each part.
    pub(super) fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    pub(super) fn documents(&self) -> &Documents {
        &self.documents
    }
}
