//! Documents in text files and JSONL.

use super::error::{DataError, LineFault};
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Format of an input file. Bytes must be UTF-8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextFormat {
    /// The file is one document.
    File,
    /// Plain text with documents separated by lines that contain only this text, or by empty lines with `""`. The end
    /// of a document's last line is not part of it, and documents without text are left out.
    Separated(String),
    /// One JSON object per line, whose field of this name is the document's text. Blank lines are left out.
    Jsonl {
        /// Name of the field, often `text`.
        field: String,
    },
}

/// A document as it stands in its file.
#[derive(Debug)]
pub(super) struct Raw {
    pub(super) bytes: Vec<u8>,
    /// Line of its beginning, counted from 1.
    pub(super) line: usize,
}

impl TextFormat {
    pub(super) fn text<'r>(&self, raw: &'r Raw) -> Result<Cow<'r, str>, LineFault> {
        let text = std::str::from_utf8(&raw.bytes).map_err(|_| LineFault::Utf8)?;
        match self {
            Self::File | Self::Separated(_) => Ok(Cow::Borrowed(text)),
            Self::Jsonl { field } => {
                let mut json = serde_json::Deserializer::from_str(text);
                let found = Field(field).deserialize(&mut json);
                let found = found.map_err(LineFault::Json)?;
                json.end().map_err(LineFault::Json)?;
                let text = found.ok_or_else(|| LineFault::NoField(field.clone()))?;
                Ok(Cow::Owned(text))
            }
        }
    }
}

/// Reads a file, one document at a time.
pub(super) struct Documents<'f> {
    format: &'f TextFormat,
    path: PathBuf,
    file: BufReader<File>,
    lines: usize,
    done: bool,
}

impl<'f> Documents<'f> {
    pub(super) fn open(path: &Path, format: &'f TextFormat) -> Result<Self, DataError> {
        let file = File::open(path).map_err(DataError::io(path))?;
        Ok(Self {
            format,
            path: path.to_path_buf(),
            file: BufReader::with_capacity(1 << 16, file),
            lines: 0,
            done: false,
        })
    }

    /// The next documents, until they have at least this many bytes together; none at the file's end.
    pub(super) fn chunk(&mut self, bytes: usize) -> Result<Vec<Raw>, DataError> {
        let (mut chunk, mut read) = (Vec::new(), 0);
        while read < bytes
            && let Some(document) = self.next_document()?
        {
            read += document.bytes.len();
            chunk.push(document);
        }
        Ok(chunk)
    }

    fn next_document(&mut self) -> Result<Option<Raw>, DataError> {
        match self.format {
            TextFormat::File => self.whole(),
            TextFormat::Separated(separator) => self.separated(separator),
            TextFormat::Jsonl { .. } => self.object(),
        }
    }

    /// Appends a line with its end to `bytes`; false at the end of the file.
    fn line(&mut self, bytes: &mut Vec<u8>) -> Result<bool, DataError> {
        let read = self.file.read_until(b'\n', bytes);
        let read = read.map_err(DataError::io(&self.path))?;
        self.lines += usize::from(read > 0);
        Ok(read > 0)
    }

    fn whole(&mut self) -> Result<Option<Raw>, DataError> {
        if self.done {
            return Ok(None);
        }
        self.done = true;
        let mut bytes = Vec::new();
        let read = self.file.read_to_end(&mut bytes);
        read.map_err(DataError::io(&self.path))?;
        Ok(Some(Raw { bytes, line: 1 }))
    }

    fn object(&mut self) -> Result<Option<Raw>, DataError> {
        let mut bytes = Vec::new();
        while self.line(&mut bytes)? {
            if !bytes.trim_ascii().is_empty() {
                let line = self.lines;
                return Ok(Some(Raw { bytes, line }));
            }
            bytes.clear();
        }
        Ok(None)
    }

    fn separated(&mut self, separator: &str) -> Result<Option<Raw>, DataError> {
        let (mut bytes, mut first) = (Vec::new(), self.lines + 1);
        loop {
            let begin = bytes.len();
            let more = self.line(&mut bytes)?;
            if more && without_end(&bytes[begin..]) != separator.as_bytes() {
                continue;
            }
            bytes.truncate(begin);
            let len = without_end(&bytes).len();
            if len > 0 {
                bytes.truncate(len);
                return Ok(Some(Raw { bytes, line: first }));
            }
            if !more {
                return Ok(None);
            }
            bytes.clear();
            first = self.lines + 1;
        }
    }
}

fn without_end(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// Finds the string of a field, and skips all others. Of several the last counts.
struct Field<'f>(&'f str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<String>;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with the text in `{}`", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        let mut text = None;
        while let Some(key) = object.next_key::<Cow<'de, str>>()? {
            if key == self.0 {
                text = Some(object.next_value()?);
            } else {
                object.next_value::<IgnoredAny>()?;
            }
        }
        Ok(text)
    }
}
