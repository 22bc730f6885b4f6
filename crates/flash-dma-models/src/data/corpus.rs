//! Conversion of text files to a token file.

use super::error::{DataError, LineFault};
use super::file::{TokenFile, TokenFileWriter};
use super::input::{Documents, Raw, TextFormat};
use super::vocabulary::Vocabulary;
use rayon::prelude::*;
use std::path::Path;

/// Bytes of text in memory at a time, unless a single document is longer.
const CHUNK: usize = 8 << 20;

/// Result of [`write_tokens`].
#[derive(Debug)]
pub struct Written {
    /// The token file.
    pub file: TokenFile,
    /// Number of documents read, including those without tokens.
    pub read: usize,
    /// Bytes of the documents, as they stand in their files.
    pub bytes: u64,
}

/// Writes the documents of `inputs`, in their order, to the token file `out`.
///
/// All cores encode; the file does not depend on their number. Some megabytes of text are in memory at a time, or a
/// single longer document. After an error, the previous contents of `out` are still there.
///
/// # Errors
///
/// [`DataError::Line`] for the first document that cannot be read or encoded, [`DataError::Vocabulary`] or
/// [`DataError::Io`].
pub fn write_tokens(
    out: impl AsRef<Path>,
    inputs: impl IntoIterator<Item = impl AsRef<Path>>,
    format: &TextFormat,
    vocabulary: &Vocabulary,
) -> Result<Written, DataError> {
    let mut writer = TokenFileWriter::create(out, vocabulary.size())?;
    let (mut read, mut bytes) = (0, 0);
    for input in inputs {
        let path = input.as_ref();
        let mut documents = Documents::open(path, format)?;
        loop {
            let chunk = documents.chunk(CHUNK)?;
            if chunk.is_empty() {
                break;
            }
            let encode = |raw: &Raw| -> Result<Vec<u32>, LineFault> {
                let ids = vocabulary.encode_document(&format.text(raw)?);
                ids.map_err(|error| LineFault::Encoding(error.to_string()))
            };
            let encoded: Vec<_> = chunk.par_iter().map(encode).collect();
            // The first fault by document order, whichever core met one first.
            for (raw, ids) in chunk.iter().zip(encoded) {
                let ids = ids.map_err(|fault| DataError::Line {
                    path: path.to_path_buf(),
                    line: raw.line,
                    fault,
                })?;
                writer.push(&ids)?;
                read += 1;
                bytes += raw.bytes.len() as u64;
            }
        }
    }
    let file = writer.finish()?;
    Ok(Written { file, read, bytes })
}
