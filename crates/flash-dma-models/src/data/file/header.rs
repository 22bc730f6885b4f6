//! The first 64 bytes of a token file.

use super::super::error::DataError;
use std::path::Path;

/// The version of the format that is read and written.
pub const VERSION: u32 = 1;

/// What a token file begins with.
const MAGIC: [u8; 8] = *b"FDMATOKS";

/// The bytes in front of the ids.
pub(super) const LEN: usize = 64;

/// The bytes of a document's end.
pub(super) const END_BYTES: u64 = 8;

/// The bytes of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    Two,
    Four,
}

impl Width {
    /// That of the ids of a vocabulary.
    pub(super) fn of(vocabulary: usize) -> Self {
        if vocabulary <= 1 << 16 {
            Self::Two
        } else {
            Self::Four
        }
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }
}

/// The number of a file's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fingerprint(pub(super) u64);

impl Fingerprint {
    /// That of no document.
    pub(super) const EMPTY: Self = Self(0xcbf2_9ce4_8422_2325);

    fn with(self, value: u64) -> Self {
        Self((self.0 ^ value).wrapping_mul(0x0100_0000_01b3))
    }

    /// And the next ids of a document.
    pub(super) fn ids(self, ids: &[u32]) -> Self {
        let ids = ids.iter().map(|&id| u64::from(id));
        ids.fold(self, Self::with)
    }

    /// And the end of a document.
    pub(super) fn end(self) -> Self {
        self.with(1 << 32)
    }
}

/// What the header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) width: Width,
    pub(super) vocabulary: u64,
    pub(super) tokens: u64,
    pub(super) documents: u64,
    pub(super) fingerprint: Fingerprint,
}

impl Header {
    pub(super) fn to_bytes(self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&(self.width.bytes() as u32).to_le_bytes());
        put(&self.vocabulary.to_le_bytes());
        put(&self.tokens.to_le_bytes());
        put(&self.documents.to_le_bytes());
        put(&self.fingerprint.0.to_le_bytes());
        bytes
    }

    /// Reads the first bytes of a file of `size` bytes, and checks that the header's numbers make this size.
    pub(super) fn read(path: &Path, first: &[u8], size: u64) -> Result<Self, DataError> {
        let path = || path.to_path_buf();
        let bytes: &[u8; LEN] = match first.first_chunk() {
            Some(bytes) if bytes.starts_with(&MAGIC) => bytes,
            _ => return Err(DataError::Magic { path: path() }),
        };
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let version = u32_at(8);
        if version != VERSION {
            let path = path();
            return Err(DataError::Version { path, version });
        }
        let broken = |what| DataError::Header { path: path(), what };
        let width = match u32_at(12) {
            2 => Width::Two,
            4 => Width::Four,
            _ => return Err(broken("the width of an id")),
        };
        let header = Self {
            width,
            vocabulary: u64_at(16),
            tokens: u64_at(24),
            documents: u64_at(32),
            fingerprint: Fingerprint(u64_at(40)),
        };
        let limit = match width {
            Width::Two => 1 << 16,
            Width::Four => 1 << 32,
        };
        if header.vocabulary > limit {
            return Err(broken("the vocabulary"));
        }
        if bytes[48..].iter().any(|&byte| byte != 0) {
            return Err(broken("the bytes that are zeros"));
        }
        let expected = header.size().ok_or_else(|| broken("the sizes"))?;
        if size != expected {
            return Err(DataError::Size {
                path: path(),
                bytes: size,
                expected,
            });
        }
        Ok(header)
    }

    /// Where the ends of the documents begin.
    pub(super) fn ends_at(&self) -> Option<u64> {
        let ids = self.tokens.checked_mul(self.width.bytes() as u64)?;
        let end = ids.checked_add(LEN as u64)?;
        end.checked_next_multiple_of(END_BYTES)
    }

    /// The size of the file, if it is a number.
    fn size(&self) -> Option<u64> {
        let ends = self.documents.checked_mul(END_BYTES)?;
        let size = self.ends_at()?.checked_add(ends)?;
        // Positions are `usize` and, on the way to a device, signed.
        isize::try_from(size).ok().and(Some(size))
    }
}
