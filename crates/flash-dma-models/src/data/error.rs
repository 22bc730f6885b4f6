//! The reasons for refusing data.

use super::loader::LoaderState;
use std::io;
use std::path::{Path, PathBuf};

/// Why text, a token file or a batch cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Its reason.
        source: io::Error,
    },
    /// A `tokenizer.json` that the `tokenizers` crate does not read.
    #[error("{}: not a tokenizer: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What the crate says.
        reason: String,
    },
    /// The tokenizer refused a text, or ids.
    #[error("the tokenizer failed: {reason}")]
    Encoding {
        /// What the crate says.
        reason: String,
    },
    /// A document of an input file.
    #[error("{}, line {line}: {fault}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1; that of the document's beginning, where a document has several.
        line: usize,
        /// What is wrong with it.
        fault: LineFault,
    },
    /// An index whose numbers do not begin with 0 and rise, or that ends within one.
    #[error("{}: not the index of a token file", path.display())]
    Index {
        /// The index.
        path: PathBuf,
    },
    /// A file of a token file that is shorter or longer than its index, or what was written, says.
    #[error("{}: {bytes} bytes, which are not {tokens} numbers of {width} bytes", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The numbers that it should have.
        tokens: u64,
        /// The bytes of each.
        width: u64,
    },
    /// An id beyond the vocabulary.
    #[error("token {position} is {id}, of a vocabulary of {vocabulary}")]
    Token {
        /// The position in the document that is written or in the file that is read.
        position: usize,
        /// The id.
        id: u32,
        /// The number of tokens in the vocabulary.
        vocabulary: usize,
    },
    /// More token ids than a model or a format has room for.
    #[error("a vocabulary of {vocabulary}, where at most {limit} fit")]
    Vocabulary {
        /// The number of tokens in the vocabulary.
        vocabulary: usize,
        /// How many there may be.
        limit: usize,
    },
    /// Rows without a token.
    #[error("the length of a row is 0")]
    RowLength,
    /// A range of documents that the file does not have.
    #[error("documents {start} to {end} of {documents}")]
    Documents {
        /// The first.
        start: usize,
        /// One past the last.
        end: usize,
        /// How many there are.
        documents: usize,
    },
    /// Too few tokens for a row.
    #[error("{tokens} tokens; a row takes at least 2")]
    NoRow {
        /// The tokens of the documents.
        tokens: usize,
    },
    /// Fewer rows than a batch takes.
    #[error("{rows} rows, which make no batch of {batch}")]
    NoBatch {
        /// The rows of an epoch.
        rows: usize,
        /// The rows of a batch.
        batch: usize,
    },
    /// An epoch that is to have no part, or more than it has batches.
    #[error("{parts} parts of an epoch of {batches} batches")]
    Parts {
        /// The parts that were asked for.
        parts: usize,
        /// The batches of an epoch.
        batches: usize,
    },
    /// A state that another loader has saved.
    #[error("the state is that of another loader: {saved:?}, here {here:?}")]
    State {
        /// The state.
        saved: Box<LoaderState>,
        /// What this loader's would be.
        here: Box<LoaderState>,
    },
}

/// What is wrong with a document of an input file.
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
    /// The error of an operation on `path`.
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}
