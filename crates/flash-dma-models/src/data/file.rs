//! Token files: the ids of documents, one behind the other, mapped into memory.

use super::error::DataError;
use memmap2::Mmap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The bytes of an id of a vocabulary.
fn width(vocabulary: usize) -> usize {
    if vocabulary <= 1 << 16 { 2 } else { 4 }
}

/// The path of the index of a token file.
fn index_of(path: &Path) -> PathBuf {
    with_end(path, ".starts")
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// The ids of documents, mapped into memory: what is read of them is in memory as long as the system likes.
///
/// There are two files, of little-endian numbers and nothing else:
///
/// | file | holds |
/// |---|---|
/// | `corpus.tokens` | the ids of all documents, of 2 bytes where the vocabulary has at most 2¹⁶ of them, of 4 otherwise |
/// | `corpus.tokens.starts` | for each document the position of its first id, and behind them the number of ids: 8 bytes each |
///
/// So `numpy.fromfile` reads both, and writes them. Nobody may change or cut the files while they are open;
/// [`TokenFileWriter`] does not, it puts others in their place.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    ids: Mmap,
    starts: Mmap,
    vocabulary: usize,
    fingerprint: u64,
}

impl TokenFile {
    /// Opens the file at `path` and the index beside it, whose ids are below `vocabulary`, and checks the index and the
    /// sizes. Ids are checked when they are [read](Self::read).
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

    /// Checks the index, and returns a number of it.
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
        // FNV-1a of 64 bits.
        let with = |hash: u64, start: u64| (hash ^ start).wrapping_mul(0x0100_0000_01b3);
        Ok(all.fold(0xcbf2_9ce4_8422_2325, with))
    }

    fn starts(&self) -> &[[u8; 8]] {
        self.starts.as_chunks().0
    }

    /// The number of tokens of all documents.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.ids.len() / width(self.vocabulary)
    }

    /// The number of documents, each of which has a token.
    #[must_use]
    pub fn documents(&self) -> usize {
        self.starts().len() - 1
    }

    /// The number of ids in the vocabulary: every id is less.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// A number of the documents' lengths: files with different ones differ.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// The tokens of a document.
    ///
    /// # Panics
    ///
    /// If there are not so many documents.
    #[must_use]
    pub fn document(&self, document: usize) -> Range<usize> {
        self.start(document)..self.start(document + 1)
    }

    /// The position of a document's first token; behind the last document, the number of tokens.
    pub(super) fn start(&self, document: usize) -> usize {
        number(self.starts()[document]) as usize
    }

    /// The document of a token.
    ///
    /// # Panics
    ///
    /// If there are not so many tokens.
    #[must_use]
    pub fn document_of(&self, token: usize) -> usize {
        assert!(token < self.tokens(), "token {token}");
        let starts = self.starts();
        starts.partition_point(|&start| number(start) <= token as u64) - 1
    }

    /// Adds the ids of a range of tokens to `ids`.
    ///
    /// # Errors
    ///
    /// [`DataError::Token`] if one of them is beyond the vocabulary: nothing has been added then.
    ///
    /// # Panics
    ///
    /// If there are not so many tokens.
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

/// Refuses an id beyond a vocabulary; the first of `ids` stands at `position`.
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

/// Refuses a file of `bytes` bytes that should have so many numbers.
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
    // SAFETY: the map is read-only. That nobody cuts the file meanwhile is asked of the caller; a writer never writes
    // into a file that has a name to open it by.
    unsafe { Mmap::map(&file) }.map_err(DataError::io(path))
}

/// Writes a token file, document by document, in constant memory.
///
/// Everything goes into two files beside `path`, whose names end with `.partial`. [`finish`](Self::finish) puts them in
/// their places, the index last, so what is there is whole. A writer that is dropped removes them; one that is killed
/// leaves them, and the next one writes over them.
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

/// A file that is removed unless it has got its place.
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

    /// Brings the file to the disk, and refuses it if it has not so many numbers.
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
        // Nobody can be told; one that has got its place has this name no more.
        fs::remove_file(&self.path).ok();
    }
}

impl TokenFileWriter {
    /// Begins a file of ids below `vocabulary`.
    ///
    /// # Errors
    ///
    /// [`DataError::Vocabulary`] if there are more ids than 32 bits count, or [`DataError::Io`].
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

    /// Adds a document. One without tokens is left out.
    ///
    /// # Errors
    ///
    /// [`DataError::Token`] if an id is beyond the vocabulary: nothing has been added then. After [`DataError::Io`]
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

    /// Puts the files in their places, once they are on the disk, and opens them.
    ///
    /// # Errors
    ///
    /// [`DataError::Io`], or [`DataError::Size`] if writing has failed before: what was at the path before is still
    /// there then, unless it could not be replaced.
    pub fn finish(mut self) -> Result<TokenFile, DataError> {
        self.ids.sync(self.tokens, width(self.vocabulary))?;
        self.starts.sync(self.documents as u64 + 1, 8)?;
        // The old index does not speak of the new ids: between the two steps there is none.
        let index = index_of(&self.path);
        if index.exists() {
            fs::remove_file(&index).map_err(DataError::io(&index))?;
        }
        self.ids.put()?;
        self.starts.put()?;
        TokenFile::open(&self.path, self.vocabulary)
    }
}
