//! Text files to a token file.

use super::error::{DataError, LineFault};
use super::file::{TokenFile, TokenFileWriter};
use super::input::{Documents, Raw, TextFormat};
use super::vocabulary::Vocabulary;
use rayon::prelude::*;
use std::mem;
use std::path::{Path, PathBuf};

/// So many bytes of text are in memory at a time, or one document that is longer.
const CHUNK: usize = 8 << 20;

/// What [`write_tokens`] has read and written.
#[derive(Debug)]
pub struct Written {
    /// The token file.
    pub file: TokenFile,
    /// The documents that were read, those without tokens included.
    pub read: usize,
    /// The bytes of the documents, as they stand in their files.
    pub bytes: u64,
}

/// Writes the documents of `inputs`, in their order, to the token file `out`.
///
/// All cores encode; the file does not depend on how many there are. Some megabytes of text are in memory at a time, or
/// one document that is longer. If there is an error, what was at `out` before is still there.
///
/// ```
/// use flash_dma_models::data::{TextFormat, Vocabulary, write_tokens};
///
/// let dir = std::env::temp_dir().join("flash-dma-corpus-example");
/// std::fs::create_dir_all(&dir).unwrap();
/// let (text, out) = (dir.join("two.jsonl"), dir.join("two.tokens"));
/// std::fs::write(&text, "{\"text\": \"one\"}\n{\"text\": \"two!\"}\n").unwrap();
///
/// let format = TextFormat::Jsonl { field: "text".into() };
/// let written = write_tokens(&out, [&text], &format, &Vocabulary::bytes())?;
/// assert_eq!((written.file.documents(), written.file.tokens()), (2, 7));
/// # Ok::<(), flash_dma_models::data::DataError>(())
/// ```
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
    let mut writing = Writing {
        writer: TokenFileWriter::create(out, vocabulary.size())?,
        format,
        vocabulary,
        waiting: Vec::new(),
        waiting_bytes: 0,
        read: 0,
        bytes: 0,
    };
    for input in inputs {
        let path = input.as_ref();
        for document in Documents::open(path, format)? {
            writing.add(path, document?)?;
        }
        writing.encode(path)?;
    }
    let Writing { read, bytes, .. } = writing;
    let file = writing.writer.finish()?;
    Ok(Written { file, read, bytes })
}

struct Writing<'a> {
    writer: TokenFileWriter,
    format: &'a TextFormat,
    vocabulary: &'a Vocabulary,
    /// Documents of the file that is read.
    waiting: Vec<Raw>,
    waiting_bytes: usize,
    read: usize,
    bytes: u64,
}

impl Writing<'_> {
    fn add(&mut self, path: &Path, document: Raw) -> Result<(), DataError> {
        self.read += 1;
        self.bytes += document.bytes.len() as u64;
        self.waiting_bytes += document.bytes.len();
        self.waiting.push(document);
        if self.waiting_bytes >= CHUNK {
            self.encode(path)?;
        }
        Ok(())
    }

    /// Encodes and writes the documents of `path` that wait.
    fn encode(&mut self, path: &Path) -> Result<(), DataError> {
        let waiting = mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        let encode = |raw: &Raw| -> Result<Vec<u32>, LineFault> {
            let text = self.format.text(raw)?;
            let ids = self.vocabulary.encode_document(&text);
            ids.map_err(|error| LineFault::Encoding(error.to_string()))
        };
        let encoded: Vec<_> = waiting.par_iter().map(encode).collect();
        // The first fault by the order of the documents, whichever core met one first.
        for (raw, ids) in waiting.iter().zip(encoded) {
            let ids = ids.map_err(|fault| DataError::Line {
                path: PathBuf::from(path),
                line: raw.line,
                fault,
            })?;
            self.writer.push(&ids)?;
        }
        Ok(())
    }
}
