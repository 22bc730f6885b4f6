//! Token files: the ids of documents, one after another, mapped into memory.

use super::error::DataError;
use memmap2::Mmap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes of an id.
fn width(vocabulary: usize) -> usize {
    if vocabulary <= 1 << 16 { 2 } else { 4 }
}

fn index_of(path: &Path) -> PathBuf {
    with_end(path, ".starts")
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// Token ids of documents, memory-mapped: the system decides how long the parts that are read stay in memory.
///
/// Two files, which contain only little-endian numbers:
///
/// | file | holds |
/// |---|---|
/// | `corpus.tokens` | the ids of all documents, 2 bytes each if the vocabulary has at most 2¹⁶ ids, otherwise 4 |
/// | `corpus.tokens.starts` | position of each document's first id, then the total number of ids: 8 bytes each |
///
/// So `numpy.fromfile` reads both, and `tofile` writes them. Nobody may change or truncate the files while they are
/// open; [`TokenFileWriter`] does not, it replaces them.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    ids: Mmap,
    starts: Mmap,
    vocabulary: usize,
    fingerprint: u64,
}

impl TokenFile {
    /// Opens the file at `path`, whose ids are below `vocabulary`, and the index next to it, and checks the index and
    /// the sizes. Ids are checked when they are [read](Self::read).
    ///
    /// # Errors
    ///
    /// [`DataError::Io`], [`DataError::Index`], [`DataError::Size`] or [`DataError::Vocabulary`].
    pub fn open(path: impl AsRef<Path>, vocabulary: usize) -> Result<Self, DataError> {
        check_vocabulary(vocabulary)?;
        let path = path.as_ref();
        let mut file = Self {
            path: path.to_path_buf(),
            ids: map(path)?,
            starts: map(&index_of(path))?,
            vocabulary,
            fingerprint: 0,
        };
        file.fingerprint = file.check()?;
        Ok(file)
    }

    /// Checks the index and returns its fingerprint.
    fn check(&self) -> Result<u64, DataError> {
        let (starts, rest) = self.starts.as_chunks();
        let mut numbers = starts.iter().copied().map(number);
        let all = numbers.clone();
        let rises = all.clone().is_sorted_by(|a, b| a < b);
        if numbers.next() != Some(0) || !rises || !rest.is_empty() {
            let path = index_of(&self.path);
            return Err(DataError::Index { path });
        }
        let (bytes, tokens) = (self.ids.len() as u64, numbers.next_back().unwrap_or(0));
        check_size(&self.path, bytes, tokens, width(self.vocabulary))?;
        // 64-bit FNV-1a.
        let with = |hash: u64, start: u64| (hash ^ start).wrapping_mul(0x0100_0000_01b3);
        Ok(all.fold(0xcbf2_9ce4_8422_2325, with))
    }

    fn starts(&self) -> &[[u8; 8]] {
        self.starts.as_chunks().0
    }

    /// Number of tokens of all documents.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.ids.len() / width(self.vocabulary)
    }

    /// Number of documents, none of which is empty.
    #[must_use]
    pub fn documents(&self) -> usize {
        self.starts().len() - 1
    }

    /// Number of ids in the vocabulary: every id is less.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Hash of the documents' lengths.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Positions of a document's tokens.
    ///
    /// # Panics
    ///
    /// If the document does not exist.
    #[must_use]
    pub fn document(&self, document: usize) -> Range<usize> {
        self.start(document)..self.start(document + 1)
    }

    /// Position of a document's first token; after the last document, the number of tokens.
    pub(super) fn start(&self, document: usize) -> usize {
        number(self.starts()[document]) as usize
    }

    /// The document of a token.
    ///
    /// # Panics
    ///
    /// If the token does not exist.
    #[must_use]
    pub fn document_of(&self, token: usize) -> usize {
        assert!(token < self.tokens(), "token {token}");
        let starts = self.starts();
        starts.partition_point(|&start| number(start) <= token as u64) - 1
    }

    /// Appends the ids of a range of tokens to `ids`.
    ///
    /// # Errors
    ///
    /// [`DataError::Token`] if one of them is outside the vocabulary: nothing has been added then.
    ///
    /// # Panics
    ///
    /// If a token does not exist.
    pub fn read(&self, tokens: Range<usize>, ids: &mut Vec<u32>) -> Result<(), DataError> {
        let (first, before) = (tokens.start, ids.len());
        if width(self.vocabulary) == 2 {
            let read = &self.ids.as_chunks().0[tokens];
            ids.extend(read.iter().map(|&id| u32::from(u16::from_le_bytes(id))));
        } else {
            let read = &self.ids.as_chunks().0[tokens];
            ids.extend(read.iter().map(|&id| u32::from_le_bytes(id)));
        }
        let checked = check_ids(&ids[before..], first, self.vocabulary);
        if checked.is_err() {
            ids.truncate(before);
        }
        checked
    }
}

fn number(bytes: [u8; 8]) -> u64 {
    u64::from_le_bytes(bytes)
}

/// Refuses an id outside the vocabulary; the first of `ids` is at `position`.
pub(super) fn check_ids(ids: &[u32], position: usize, vocabulary: usize) -> Result<(), DataError> {
    match ids.iter().position(|&id| id as usize >= vocabulary) {
        None => Ok(()),
        Some(place) => Err(DataError::Token {
            position: position + place,
            id: ids[place],
            vocabulary,
        }),
    }
}

/// Refuses a file of `bytes` bytes that does not have this many numbers.
fn check_size(path: &Path, bytes: u64, tokens: u64, width: usize) -> Result<(), DataError> {
    let width = width as u64;
    if tokens.checked_mul(width) == Some(bytes) {
        return Ok(());
    }
    Err(DataError::Size {
        path: path.to_path_buf(),
        bytes,
        tokens,
        width,
    })
}

fn check_vocabulary(vocabulary: usize) -> Result<(), DataError> {
    let limit = usize::try_from(1u64 << 32).unwrap_or(usize::MAX);
    if vocabulary > limit {
        return Err(DataError::Vocabulary { vocabulary, limit });
    }
    Ok(())
}

fn map(path: &Path) -> Result<Mmap, DataError> {
    let file = File::open(path).map_err(DataError::io(path))?;
    // SAFETY: the map is read-only. The caller promises that nobody truncates the file meanwhile; a writer never
    // writes into a file under a name to open it by.
    unsafe { Mmap::map(&file) }.map_err(DataError::io(path))
}

/// Writes a token file, document by document, in constant memory.
///
/// Writes two files next to `path`, whose names end with `.partial`. [`finish`](Self::finish) moves them into place,
/// the index last, so existing files are always complete. Dropping a writer removes them; a killed one leaves them,
/// and the next one overwrites them.
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
/// assert_eq!(std::fs::read(&path).unwrap(), [104, 0, 105, 0, 33, 0]);
/// # Ok::<(), flash_dma_models::data::DataError>(())
/// ```
#[derive(Debug)]
pub struct TokenFileWriter {
    path: PathBuf,
    vocabulary: usize,
    ids: Part,
    starts: Part,
    tokens: u64,
    documents: usize,
}

/// A file that is removed unless it has been moved into place.
#[derive(Debug)]
struct Part {
    place: PathBuf,
    path: PathBuf,
    file: BufWriter<File>,
}

impl Part {
    fn create(place: PathBuf) -> Result<Self, DataError> {
        let path = with_end(&place, ".partial");
        let file = File::create(&path).map_err(DataError::io(&path))?;
        let file = BufWriter::new(file);
        Ok(Self { place, path, file })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        let written = self.file.write_all(bytes);
        written.map_err(DataError::io(&self.path))
    }

    /// Flushes the file to disk, and refuses it if it does not have this many numbers.
    fn sync(&mut self, numbers: u64, width: usize) -> Result<(), DataError> {
        let mut sync = || {
            self.file.flush()?;
            self.file.get_ref().sync_all()?;
            self.file.get_ref().metadata()
        };
        let bytes = sync().map_err(DataError::io(&self.path))?.len();
        check_size(&self.path, bytes, numbers, width)
    }

    fn put(&self) -> Result<(), DataError> {
        fs::rename(&self.path, &self.place).map_err(DataError::io(&self.place))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // There is nobody to tell; a file moved into place no longer has this name.
        fs::remove_file(&self.path).ok();
    }
}

impl TokenFileWriter {
    /// Creates a file of ids below `vocabulary`.
    ///
    /// # Errors
    ///
    /// [`DataError::Vocabulary`] if ids do not fit 32 bits, or [`DataError::Io`].
    pub fn create(path: impl AsRef<Path>, vocabulary: usize) -> Result<Self, DataError> {
        check_vocabulary(vocabulary)?;
        let path = path.as_ref().to_path_buf();
        let (ids, mut starts) = (Part::create(path.clone())?, Part::create(index_of(&path))?);
        starts.write(&0u64.to_le_bytes())?;
        Ok(Self {
            path,
            vocabulary,
            ids,
            starts,
            tokens: 0,
            documents: 0,
        })
    }

    /// Adds a document. Empty ones are left out.
    ///
    /// # Errors
    ///
    /// [`DataError::Token`] if an id is outside the vocabulary: nothing has been added then. After [`DataError::Io`]
    /// the file cannot be finished.
    pub fn push(&mut self, document: &[u32]) -> Result<(), DataError> {
        check_ids(document, 0, self.vocabulary)?;
        if document.is_empty() {
            return Ok(());
        }
        self.tokens += document.len() as u64;
        self.documents += 1;
        for id in document {
            let bytes = id.to_le_bytes();
            self.ids.write(&bytes[..width(self.vocabulary)])?;
        }
        self.starts.write(&self.tokens.to_le_bytes())
    }

    /// Flushes the files to disk, moves them into place and opens them.
    ///
    /// # Errors
    ///
    /// [`DataError::Io`], or [`DataError::Size`] if writing failed before: the previous files are still there then,
    /// unless they could not be replaced.
    pub fn finish(mut self) -> Result<TokenFile, DataError> {
        self.ids.sync(self.tokens, width(self.vocabulary))?;
        self.starts.sync(self.documents as u64 + 1, 8)?;
        // The old index does not fit the new ids: between the two steps there is none.
        let index = index_of(&self.path);
        if index.exists() {
            fs::remove_file(&index).map_err(DataError::io(&index))?;
        }
        self.ids.put()?;
        self.starts.put()?;
        TokenFile::open(&self.path, self.vocabulary)
    }
}
