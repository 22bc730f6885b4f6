//! Errors of data.

use super::state::LoaderState;
use std::io;
use std::path::{Path, PathBuf};

/// Error of reading text, a token file or a batch. The text of each error explains its fields.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum DataError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// A `tokenizer.json` that the `tokenizers` crate does not read.
    #[error("{}: not a tokenizer: {reason}", path.display())]
    Tokenizer { path: PathBuf, reason: String },
    /// The tokenizer refused a text or ids.
    #[error("the tokenizer failed: {reason}")]
    Encoding { reason: String },
    /// A document of an input file.
    #[error("{}, line {line}: {fault}", path.display())]
    Line {
        path: PathBuf,
        /// The line, counted from 1; that of its beginning if a document has several.
        line: usize,
        fault: LineFault,
    },
    /// An index whose numbers do not begin with 0 and rise, or that ends within a number.
    #[error("{}: not the index of a token file", path.display())]
    Index { path: PathBuf },
    /// A part of a token file that is shorter or longer than its index, or the written data, says.
    #[error("{}: {bytes} bytes, which are not {tokens} numbers of {width} bytes", path.display())]
    Size {
        path: PathBuf,
        bytes: u64,
        tokens: u64,
        width: u64,
    },
    /// An id beyond the vocabulary.
    #[error("token {position} is {id}, of a vocabulary of {vocabulary}")]
    Token {
        /// Position in the written document or in the file that is read.
        position: usize,
        id: u32,
        vocabulary: usize,
    },
    /// More token ids than a model or a format supports.
    #[error("a vocabulary of {vocabulary}, where at most {limit} fit")]
    Vocabulary { vocabulary: usize, limit: usize },
    /// Rows without a token.
    #[error("the length of a row is 0")]
    RowLength,
    /// A range of documents that the file does not have.
    #[error("documents {start} to {end} of {documents}")]
    Documents {
        start: usize,
        end: usize,
        documents: usize,
    },
    /// Too few tokens for a row.
    #[error("{tokens} tokens; a row takes at least 2")]
    NoRow { tokens: usize },
    /// Fewer rows than a batch needs.
    #[error("{rows} rows, which make no batch of {batch}")]
    NoBatch { rows: usize, batch: usize },
    /// An epoch of no parts, or of more than it has batches.
    #[error("{parts} parts of an epoch of {batches} batches")]
    Parts { parts: usize, batches: usize },
    /// A saved state of another loader.
    #[error("the state is that of another loader: {saved:?}, here {here:?}")]
    State {
        saved: Box<LoaderState>,
        here: Box<LoaderState>,
    },
}

/// Fault of a document in an input file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineFault {
    /// Bytes that are not UTF-8.
    #[error("not UTF-8")]
    Utf8,
    /// A line that is not a JSON object, or whose field is not a string.
    #[error("{0}")]
    Json(serde_json::Error),
    /// An object without the field.
    #[error("no field `{0}`")]
    NoField(String),
    /// The tokenizer refused the text.
    #[error("the tokenizer failed: {0}")]
    Encoding(String),
}

impl DataError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}
