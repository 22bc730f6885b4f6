//! Packing of documents into rows of one length.

use super::error::DataError;
use super::file::TokenFile;
use burn::data::dataset::{Dataset, DatasetError};
use std::ops::Range;
use std::sync::Arc;

/// A row: `len` inputs and as many targets, one token further.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    tokens: Vec<u32>,
    documents: Vec<usize>,
    weights: Vec<f32>,
    padding: usize,
}

impl Row {
    /// The `len` input tokens. After the end of the last document they are zeros.
    #[must_use]
    pub fn inputs(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - 1]
    }

    /// Token after each input.
    #[must_use]
    pub fn targets(&self) -> &[u32] {
        &self.tokens[1..]
    }

    /// Number of inputs of each document, in order. They add up to `len`: padding is one more.
    #[must_use]
    pub fn documents(&self) -> &[usize] {
        &self.documents
    }

    /// 1 for each target in its input's document, 0 for all others and for padding.
    #[must_use]
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Number of inputs after the last document.
    #[must_use]
    pub fn padding(&self) -> usize {
        self.padding
    }
}

/// Documents of a token file, cut into rows: a Burn dataset.
///
/// The documents follow one another as in the file. Row `r` reads tokens `r · len .. (r + 1) · len` and predicts
/// those one further. So an epoch of all rows reads every token once and has every token but the first as a target
/// once; the last token is read only if its row is padded for it, and otherwise is only a target.
///
/// - A document that does not end with its row continues in the next one, as a document of its own: it is split, not
///   truncated. The target of the row's last input is the first input of the next row.
/// - The last token of a document predicts nothing: its target, in the next document, has weight 0.
/// - Tokens that do not fill a row make one more, which is padded. Its padding is a document of its own, of weight 0.
///
/// ```
/// use flash_dma_models::data::{PackedRows, TokenFileWriter};
/// use std::sync::Arc;
///
/// let path = std::env::temp_dir().join("flash-dma-rows-example.tokens");
/// let mut writer = TokenFileWriter::create(&path, 256)?;
/// writer.push(&[1, 2, 3])?;
/// writer.push(&[4, 5, 6, 7])?;
/// let rows = PackedRows::new(Arc::new(writer.finish()?), 4)?;
///
/// let first = rows.row(0)?;
/// assert_eq!(first.inputs(), [1, 2, 3, 4]);
/// assert_eq!(first.targets(), [2, 3, 4, 5]);
/// assert_eq!(first.documents(), [3, 1]);
/// assert_eq!(first.weights(), [1.0, 1.0, 0.0, 1.0]);
/// // The rest of the second document, and one position of padding.
/// let second = rows.row(1)?;
/// assert_eq!(second.inputs(), [5, 6, 7, 0]);
/// assert_eq!(second.documents(), [3, 1]);
/// assert_eq!(second.weights(), [1.0, 1.0, 0.0, 0.0]);
/// # Ok::<(), flash_dma_models::data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PackedRows {
    file: Arc<TokenFile>,
    len: usize,
    tokens: Range<usize>,
}

impl PackedRows {
    /// Rows of `len` inputs, of all documents.
    ///
    /// # Errors
    ///
    /// [`DataError::RowLength`] or [`DataError::NoRow`].
    pub fn new(file: Arc<TokenFile>, len: usize) -> Result<Self, DataError> {
        let documents = 0..file.documents();
        Self::of(file, documents, len)
    }

    /// Rows of `len` inputs, of a range of documents, for example to keep the others for validation.
    ///
    /// # Errors
    ///
    /// [`DataError::RowLength`], [`DataError::Documents`] or [`DataError::NoRow`].
    pub fn of(
        file: Arc<TokenFile>,
        documents: Range<usize>,
        len: usize,
    ) -> Result<Self, DataError> {
        if len == 0 {
            return Err(DataError::RowLength);
        }
        let Range { start, end } = documents;
        if start > end || end > file.documents() {
            return Err(DataError::Documents {
                start,
                end,
                documents: file.documents(),
            });
        }
        let tokens = file.start(start)..file.start(end);
        if tokens.len() < 2 {
            let tokens = tokens.len();
            return Err(DataError::NoRow { tokens });
        }
        Ok(Self { file, len, tokens })
    }

    /// Number of inputs of a row.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.len
    }

    /// Tokens of the documents, as positions in the file.
    #[must_use]
    pub fn tokens(&self) -> Range<usize> {
        self.tokens.clone()
    }

    /// The token file.
    #[must_use]
    pub fn file(&self) -> &Arc<TokenFile> {
        &self.file
    }

    /// Reads a row.
    ///
    /// # Errors
    ///
    /// [`DataError::Token`] if the file has been damaged.
    ///
    /// # Panics
    ///
    /// If the row does not exist.
    pub fn row(&self, row: usize) -> Result<Row, DataError> {
        assert!(row < self.len(), "row {row} of {}", self.len());
        let start = self.tokens.start + row * self.len;
        let last = self.tokens.end - start;
        let mut tokens = Vec::with_capacity(self.len + 1);
        let read = start..start + last.min(self.len + 1);
        self.file.read(read, &mut tokens)?;
        tokens.resize(self.len + 1, 0);

        let end = start + last.min(self.len);
        let (mut documents, mut weights) = (Vec::new(), Vec::with_capacity(self.len));
        let (mut at, mut document) = (start, self.file.document_of(start));
        while at < end {
            let document_end = self.file.document(document).end;
            let stop = document_end.min(end);
            documents.push(stop - at);
            weights.resize(weights.len() + stop - at, 1.0);
            if stop == document_end {
                weights[stop - start - 1] = 0.0;
            }
            (at, document) = (stop, document + 1);
        }
        let padding = self.len - weights.len();
        if padding > 0 {
            documents.push(padding);
            weights.resize(self.len, 0.0);
        }
        Ok(Row {
            tokens,
            documents,
            weights,
            padding,
        })
    }
}

impl Dataset<Row> for PackedRows {
    fn get(&self, index: usize) -> Result<Row, DatasetError> {
        self.row(index).map_err(DatasetError::new)
    }

    fn len(&self) -> usize {
        (self.tokens.len() - 1).div_ceil(self.len)
    }
}
