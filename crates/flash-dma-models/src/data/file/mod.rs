//! Token files: the ids of documents, one behind the other, mapped into memory.
//!
//! All numbers are little-endian.
//!
//! | offset | bytes | holds |
//! |---|---|---|
//! | 0 | 8 | `FDMATOKS` |
//! | 8 | 4 | the version of the format, 1 |
//! | 12 | 4 | the width of an id in bytes, 2 or 4 |
//! | 16 | 8 | the number of ids in the vocabulary, at most 2¹⁶ where the width is 2 |
//! | 24 | 8 | the number of tokens |
//! | 32 | 8 | the number of documents |
//! | 40 | 8 | the fingerprint |
//! | 48 | 16 | zeros |
//! | 64 | tokens · width | the ids |
//! | | 0 to 7 | zeros, up to a multiple of 8 |
//! | | documents · 8 | for each document, one past its last token; the numbers rise |
//!
//! The fingerprint begins with 0xcbf29ce484222325. Every id, and 2³² behind the last id of a document, is combined with
//! it by an exclusive or, and the result is multiplied by 0x100000001b3 modulo 2⁶⁴.

mod header;
mod reader;
mod writer;

pub use header::VERSION;
pub use reader::TokenFile;
pub use writer::TokenFileWriter;
