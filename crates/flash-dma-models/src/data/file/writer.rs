//! Writes a token file, document by document.

use super::super::error::DataError;
use super::header::{END_BYTES, Fingerprint, Header, LEN, Width};
use super::reader::TokenFile;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

/// The next number of a file that is being written in this process.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Writes a token file in constant memory.
///
/// Everything goes into two files beside `path`, whose names begin with a full stop and end with `.partial`.
/// [`finish`](Self::finish) joins them and puts the result in the place of `path`, so a file of that name is always
/// whole. A writer that is dropped removes them; one that is killed leaves them, and neither reads as a token file.
///
/// ```
/// use flash_dma_models::data::TokenFileWriter;
///
/// let path = std::env::temp_dir().join("flash-dma-writer-example.tokens");
/// let mut writer = TokenFileWriter::create(&path, 256)?;
/// writer.push(&[104, 105])?;
/// writer.push(&[33])?;
/// let file = writer.finish()?;
/// assert_eq!((file.tokens(), file.documents()), (3, 2));
/// assert_eq!(file.document(1), 2..3);
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), flash_dma_models::data::DataError>(())
/// ```
#[derive(Debug)]
pub struct TokenFileWriter {
    path: PathBuf,
    header: Header,
    /// `None` once an operation has failed.
    parts: Option<Parts>,
    /// The bytes of the document that is written, kept for its memory.
    bytes: Vec<u8>,
}

/// The files that are being written.
#[derive(Debug)]
struct Parts {
    ids: Part,
    /// The ends of the documents.
    ends: Part,
}

/// A file that is removed unless it has been renamed.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: BufWriter<File>,
    renamed: bool,
}

impl Part {
    fn create(path: PathBuf) -> Result<Self, DataError> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(&path);
        Ok(Self {
            file: BufWriter::new(file.map_err(DataError::io(&path))?),
            path,
            renamed: false,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        let written = self.file.write_all(bytes);
        written.map_err(DataError::io(&self.path))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.renamed {
            // Nobody can be told; what stays does not read as a token file.
            fs::remove_file(&self.path).ok();
        }
    }
}

impl TokenFileWriter {
    /// Begins a file of ids below `vocabulary`.
    ///
    /// # Errors
    ///
    /// [`DataError::Vocabulary`] if there are more ids than 32 bits count, or [`DataError::Io`].
    pub fn create(path: impl AsRef<Path>, vocabulary: usize) -> Result<Self, DataError> {
        let limit = usize::try_from(1u64 << 32).unwrap_or(usize::MAX);
        if vocabulary > limit {
            return Err(DataError::Vocabulary { vocabulary, limit });
        }
        let path = path.as_ref();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let part = |what: &str| {
            let mut name = OsString::from(".");
            name.push(path.file_name().unwrap_or_default());
            name.push(format!(".{}-{number}.{what}.partial", process::id()));
            Part::create(path.with_file_name(name))
        };
        let mut ids = part("ids")?;
        let ends = part("ends")?;
        // Zeros until the file is whole: what is not finished has no magic.
        ids.write(&[0; LEN])?;
        Ok(Self {
            path: path.to_path_buf(),
            header: Header {
                width: Width::of(vocabulary),
                vocabulary: vocabulary as u64,
                tokens: 0,
                documents: 0,
                fingerprint: Fingerprint::EMPTY,
            },
            parts: Some(Parts { ids, ends }),
            bytes: Vec::new(),
        })
    }

    /// Adds a document. One without tokens is left out.
    ///
    /// # Errors
    ///
    /// [`DataError::Token`] if an id is beyond the vocabulary: nothing has been added then. After [`DataError::Io`] the
    /// writer only returns [`DataError::Abandoned`].
    pub fn push(&mut self, document: &[u32]) -> Result<(), DataError> {
        let mut parts = self.take()?;
        let added = self.add(document, &mut parts);
        if !matches!(added, Err(DataError::Io { .. })) {
            self.parts = Some(parts);
        }
        added
    }

    fn take(&mut self) -> Result<Parts, DataError> {
        self.parts.take().ok_or_else(|| DataError::Abandoned {
            path: self.path.clone(),
        })
    }

    fn add(&mut self, document: &[u32], parts: &mut Parts) -> Result<(), DataError> {
        if document.is_empty() {
            return Ok(());
        }
        let vocabulary = self.header.vocabulary;
        let beyond = |&id: &u32| u64::from(id) >= vocabulary;
        if let Some(position) = document.iter().position(beyond) {
            return Err(DataError::Token {
                position,
                id: document[position],
                vocabulary: vocabulary as usize,
            });
        }
        self.bytes.clear();
        for id in document {
            let bytes = id.to_le_bytes();
            self.bytes
                .extend_from_slice(&bytes[..self.header.width.bytes()]);
        }
        parts.ids.write(&self.bytes)?;
        let end = self.header.tokens + document.len() as u64;
        parts.ends.write(&end.to_le_bytes())?;
        self.header.tokens = end;
        self.header.documents += 1;
        self.header.fingerprint = self.header.fingerprint.ids(document).end();
        Ok(())
    }

    /// The tokens so far.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.header.tokens as usize
    }

    /// The documents so far.
    #[must_use]
    pub fn documents(&self) -> usize {
        self.header.documents as usize
    }

    /// Puts the file in its place, once it is on the disk, and opens it.
    ///
    /// # Errors
    ///
    /// [`DataError::Io`] or [`DataError::Abandoned`]: what was at the path before is still there.
    pub fn finish(mut self) -> Result<TokenFile, DataError> {
        let Parts { mut ids, mut ends } = self.take()?;
        let used = self.header.tokens * self.header.width.bytes() as u64;
        let padding = used.next_multiple_of(END_BYTES) - used;
        ids.write(&[0; END_BYTES as usize][..padding as usize])?;
        let joined = join(&mut ids.file, &mut ends.file, &self.header);
        joined.map_err(DataError::io(&ids.path))?;
        fs::rename(&ids.path, &self.path).map_err(DataError::io(&self.path))?;
        ids.renamed = true;
        TokenFile::open(&self.path)
    }
}

/// Puts the ends behind the ids, and the header in front, last of all.
fn join(ids: &mut BufWriter<File>, ends: &mut BufWriter<File>, header: &Header) -> io::Result<()> {
    ends.flush()?;
    ends.get_mut().rewind()?;
    io::copy(&mut BufReader::new(ends.get_ref()), ids)?;
    ids.flush()?;
    ids.get_ref().sync_all()?;
    ids.seek(SeekFrom::Start(0))?;
    ids.write_all(&header.to_bytes())?;
    ids.flush()?;
    ids.get_ref().sync_all()
}
