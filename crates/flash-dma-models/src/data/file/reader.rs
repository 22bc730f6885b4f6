//! Reads a token file.

use super::super::error::DataError;
use super::header::{END_BYTES, Fingerprint, Header, LEN, Width};
use memmap2::Mmap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A token file, mapped into memory: what is read of it is in memory as long as the system likes.
///
/// Nobody may change or cut the file while it is open; [`TokenFileWriter`](super::TokenFileWriter) does not, it puts
/// another one in its place.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    map: Mmap,
    header: Header,
    /// Where the ends of the documents begin.
    ends_at: usize,
}

impl TokenFile {
    /// Opens a file and checks its header, its size, and the ends of its documents. Ids are checked when they are
    /// [read](Self::read), the whole file by [`verify`](Self::verify).
    ///
    /// # Errors
    ///
    /// [`DataError::Io`], [`DataError::Magic`], [`DataError::Version`], [`DataError::Header`], [`DataError::Size`] or
    /// [`DataError::DocumentEnd`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DataError> {
        let path = path.as_ref();
        let file = File::open(path).map_err(DataError::io(path))?;
        let metadata = file.metadata().map_err(DataError::io(path))?;
        if !metadata.is_file() || metadata.len() < LEN as u64 {
            let path = path.to_path_buf();
            return Err(DataError::Magic { path });
        }
        // SAFETY: the map is read-only and lives as long as `self`. That nobody cuts the file meanwhile is asked of
        // the caller; `finish` never writes into a file that has a name to open it by.
        let map = unsafe { Mmap::map(&file) }.map_err(DataError::io(path))?;
        let header = Header::read(path, &map, map.len() as u64)?;
        let ends_at = header.ends_at().expect("a checked header");
        let file = Self {
            path: path.to_path_buf(),
            map,
            header,
            ends_at: ends_at as usize,
        };
        file.check_ends()?;
        Ok(file)
    }

    fn check_ends(&self) -> Result<(), DataError> {
        let mut before = 0;
        for document in 0..self.documents() {
            let end = self.end(document);
            let last = document + 1 == self.documents();
            if end <= before || end > self.header.tokens || (last && end != self.header.tokens) {
                let path = self.path.clone();
                return Err(DataError::DocumentEnd { path, document });
            }
            before = end;
        }
        if before == self.header.tokens {
            Ok(())
        } else {
            Err(DataError::Header {
                path: self.path.clone(),
                what: "tokens without a document",
            })
        }
    }

    /// Checks that the file's ids fit a model of `vocabulary` ids.
    ///
    /// # Errors
    ///
    /// [`DataError::Vocabulary`].
    pub fn check_vocabulary(&self, vocabulary: usize) -> Result<(), DataError> {
        if self.vocabulary() <= vocabulary {
            Ok(())
        } else {
            Err(DataError::Vocabulary {
                vocabulary: self.vocabulary(),
                limit: vocabulary,
            })
        }
    }

    /// Reads the whole file and compares it with its fingerprint.
    ///
    /// # Errors
    ///
    /// [`DataError::Token`] or [`DataError::Fingerprint`].
    pub fn verify(&self) -> Result<(), DataError> {
        const STEP: usize = 1 << 16;
        let mut fingerprint = Fingerprint::EMPTY;
        let mut ids = Vec::new();
        for document in 0..self.documents() {
            let Range { start, end } = self.document(document);
            for first in (start..end).step_by(STEP) {
                ids.clear();
                self.read(first..end.min(first + STEP), &mut ids)?;
                fingerprint = fingerprint.ids(&ids);
            }
            fingerprint = fingerprint.end();
        }
        if fingerprint == self.header.fingerprint {
            Ok(())
        } else {
            let path = self.path.clone();
            Err(DataError::Fingerprint { path })
        }
    }

    /// The path by which the file was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of tokens of all documents.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.header.tokens as usize
    }

    /// The number of documents, each of which has a token.
    #[must_use]
    pub fn documents(&self) -> usize {
        self.header.documents as usize
    }

    /// The number of ids in the vocabulary: every id is less.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.header.vocabulary as usize
    }

    /// A number of the contents: files with different ones differ, and other files hardly ever have the same.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.header.fingerprint.0
    }

    /// The tokens of a document.
    ///
    /// # Panics
    ///
    /// If there are not so many documents.
    #[must_use]
    pub fn document(&self, document: usize) -> Range<usize> {
        assert!(document < self.documents(), "document {document}");
        let start = document.checked_sub(1).map_or(0, |before| self.end(before));
        start as usize..self.end(document) as usize
    }

    /// The document of a token.
    ///
    /// # Panics
    ///
    /// If there are not so many tokens.
    #[must_use]
    pub fn document_of(&self, token: usize) -> usize {
        assert!(token < self.tokens(), "token {token}");
        let (mut low, mut high) = (0, self.documents());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.end(middle) <= token as u64 {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
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
        assert!(
            tokens.start <= tokens.end && tokens.end <= self.tokens(),
            "tokens {tokens:?}"
        );
        let width = self.header.width.bytes();
        let bytes = &self.map[LEN + tokens.start * width..LEN + tokens.end * width];
        let before = ids.len();
        match self.header.width {
            Width::Two => ids.extend(chunks(bytes).map(|id| u32::from(u16::from_le_bytes(id)))),
            Width::Four => ids.extend(chunks(bytes).map(u32::from_le_bytes)),
        }
        let vocabulary = self.vocabulary();
        let beyond = |&id: &u32| id as usize >= vocabulary;
        if let Some(place) = ids[before..].iter().position(beyond) {
            let id = ids[before + place];
            ids.truncate(before);
            return Err(DataError::Token {
                position: tokens.start + place,
                id,
                vocabulary,
            });
        }
        Ok(())
    }

    /// One past the last token of a document.
    fn end(&self, document: usize) -> u64 {
        let at = self.ends_at + document * END_BYTES as usize;
        u64::from_le_bytes(std::array::from_fn(|i| self.map[at + i]))
    }
}

/// Bytes in groups of `N`.
fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    let (chunks, rest) = bytes.as_chunks();
    debug_assert!(rest.is_empty());
    chunks.iter().copied()
}
