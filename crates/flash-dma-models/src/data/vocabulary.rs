//! Text to token ids and back.

use super::error::DataError;
use super::file::check_ids;
use std::path::Path;
use std::sync::Arc;
use tokenizers::Tokenizer;

/// Meaning of a text's ids, bytes or the tokens of a `tokenizer.json`, and the ids that frame a document.
///
/// Clones share the tokenizer.
///
/// ```
/// use flash_dma_models::data::Vocabulary;
///
/// let bytes = Vocabulary::bytes().with_end(0)?;
/// assert_eq!(bytes.encode("né")?, [110, 195, 169]);
/// assert_eq!(bytes.encode_document("a")?, [97, 0]);
/// assert_eq!(bytes.decode(&[110, 195, 169, 0])?, "né");
/// # Ok::<(), flash_dma_models::data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Vocabulary {
    ids: Ids,
    /// One more than the greatest id.
    size: usize,
    begin: Option<u32>,
    end: Option<u32>,
}

#[derive(Clone, Debug)]
enum Ids {
    Bytes,
    Tokenizer(Arc<Tokenizer>),
}

impl Vocabulary {
    /// The 256 bytes of UTF-8.
    #[must_use]
    pub fn bytes() -> Self {
        Self::new(Ids::Bytes, 256)
    }

    /// The tokenizer of a `tokenizer.json` in Hugging Face's format. Truncation and padding are switched off, and its
    /// post-processor adds nothing: use [`with_begin`](Self::with_begin) and [`with_end`](Self::with_end) to frame
    /// documents. A text that spells a special token gets its id.
    ///
    /// # Errors
    ///
    /// [`DataError::Io`] or [`DataError::Tokenizer`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, DataError> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(DataError::io(path))?;
        let not_one = |reason: tokenizers::Error| DataError::Tokenizer {
            path: path.to_path_buf(),
            reason: reason.to_string(),
        };
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(not_one)?;
        tokenizer.with_truncation(None).map_err(not_one)?;
        tokenizer.with_padding(None);
        let ids = tokenizer.get_vocab(true);
        let size = ids.values().max().map_or(0, |&id| id as usize + 1);
        Ok(Self::new(Ids::Tokenizer(Arc::new(tokenizer)), size))
    }

    fn new(ids: Ids, size: usize) -> Self {
        Self {
            ids,
            size,
            begin: None,
            end: None,
        }
    }

    /// Begins every document with this id.
    ///
    /// # Errors
    ///
    /// [`DataError::Token`] if the vocabulary does not have it.
    pub fn with_begin(mut self, id: u32) -> Result<Self, DataError> {
        self.begin = Some(self.known(id)?);
        Ok(self)
    }

    /// Ends every document with this id, so that a model learns to stop with it. A byte that no text has is 0.
    ///
    /// # Errors
    ///
    /// [`DataError::Token`] if the vocabulary does not have it.
    pub fn with_end(mut self, id: u32) -> Result<Self, DataError> {
        self.end = Some(self.known(id)?);
        Ok(self)
    }

    /// Begins every document with the id, if any, that the post-processor of the `tokenizer.json` puts before a text.
    ///
    /// # Errors
    ///
    /// [`DataError::Encoding`] if the tokenizer refuses a text of one letter.
    pub fn with_own_begin(mut self) -> Result<Self, DataError> {
        if let Ids::Tokenizer(tokenizer) = &self.ids {
            let first = |special| -> Result<Option<u32>, DataError> {
                let encoding = tokenizer.encode_fast("a", special).map_err(failed)?;
                Ok(encoding.get_ids().first().copied())
            };
            let (with, without) = (first(true)?, first(false)?);
            self.begin = with.filter(|_| with != without);
        }
        Ok(self)
    }

    fn known(&self, id: u32) -> Result<u32, DataError> {
        check_ids(&[id], 0, self.size).map(|()| id)
    }

    /// Id at the beginning of documents.
    #[must_use]
    pub fn begin(&self) -> Option<u32> {
        self.begin
    }

    /// Id at the end of documents.
    #[must_use]
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// Number of ids, one more than the greatest. A model needs at least as many.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Id of a token by its text, for example `<|end_of_text|>`.
    #[must_use]
    pub fn id(&self, token: &str) -> Option<u32> {
        match &self.ids {
            Ids::Bytes => match token.as_bytes() {
                [byte] => Some(u32::from(*byte)),
                _ => None,
            },
            Ids::Tokenizer(tokenizer) => tokenizer.token_to_id(token),
        }
    }

    /// Ids of a text, without those that frame a document.
    ///
    /// # Errors
    ///
    /// [`DataError::Encoding`] if the tokenizer refuses it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match &self.ids {
            Ids::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Ids::Tokenizer(tokenizer) => {
                let encoding = tokenizer.encode_fast(text, false).map_err(failed)?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Ids of a text with those that frame a document; empty for a text without ids.
    ///
    /// # Errors
    ///
    /// [`DataError::Encoding`] if the tokenizer refuses it.
    pub fn encode_document(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let mut ids = self.encode(text)?;
        if !ids.is_empty() {
            if let Some(begin) = self.begin {
                ids.insert(0, begin);
            }
            ids.extend(self.end);
        }
        Ok(ids)
    }

    /// Text of ids, without special tokens and the frame of a document. Bytes that are not UTF-8 become `�`; ids
    /// outside the vocabulary are skipped.
    ///
    /// # Errors
    ///
    /// [`DataError::Encoding`] if the tokenizer refuses them.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        let shown = ids.iter().copied().filter(|&id| self.shows(id));
        match &self.ids {
            Ids::Bytes => {
                let bytes: Vec<u8> = shown.map(|id| id as u8).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Ids::Tokenizer(tokenizer) => {
                let ids: Vec<u32> = shown.collect();
                tokenizer.decode(&ids, true).map_err(failed)
            }
        }
    }

    /// Decoder of ids that arrive one by one.
    #[must_use]
    pub fn stream(&self) -> TextStream<'_> {
        TextStream {
            vocabulary: self,
            ids: Vec::new(),
            given: 0,
        }
    }

    fn shows(&self, id: u32) -> bool {
        let frames = Some(id) == self.begin || Some(id) == self.end;
        (id as usize) < self.size && !frames
    }
}

fn failed(reason: tokenizers::Error) -> DataError {
    DataError::Encoding {
        reason: reason.to_string(),
    }
}

/// Text of ids that arrive one by one, to show a running generation. Made by [`Vocabulary::stream`].
///
/// ```
/// use flash_dma_models::data::Vocabulary;
///
/// let bytes = Vocabulary::bytes();
/// let mut stream = bytes.stream();
/// assert_eq!(stream.push(110)?, "n");
/// // The first of two bytes of a letter shows nothing yet.
/// assert_eq!(stream.push(195)?, "");
/// assert_eq!(stream.push(169)?, "é");
/// // Where the ids end, nothing can complete a letter.
/// assert_eq!(stream.push(195)?, "");
/// assert_eq!(stream.finish()?, "\u{fffd}");
/// # Ok::<(), flash_dma_models::data::DataError>(())
/// ```
pub struct TextStream<'v> {
    vocabulary: &'v Vocabulary,
    /// Ids of the last text returned, and those after it.
    ids: Vec<u32>,
    /// How many of them have been returned. The rest is decoded after them: a first token may lose a space.
    given: usize,
}

impl TextStream<'_> {
    /// Text that one more id makes certain: often a word or a letter, empty while a letter is incomplete.
    ///
    /// # Errors
    ///
    /// [`DataError::Encoding`] if the tokenizer refuses it.
    pub fn push(&mut self, id: u32) -> Result<String, DataError> {
        if !self.vocabulary.shows(id) {
            return Ok(String::new());
        }
        self.ids.push(id);
        if let Ids::Bytes = self.vocabulary.ids {
            let whole: Vec<u32> = self.ids.drain(..whole_letters(&self.ids)).collect();
            return self.vocabulary.decode(&whole);
        }
        let [all, given] = self.decoded()?;
        if all.len() <= given.len() || all.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        let Some(text) = all.strip_prefix(&given) else {
            let reason = format!("{all:?} does not go on from {given:?}");
            return Err(DataError::Encoding { reason });
        };
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        Ok(text.to_owned())
    }

    /// Rest of the text where the ids end, with `�` for an incomplete letter; often empty. All texts together are
    /// those of [`Vocabulary::decode`]. The next id begins another text.
    ///
    /// # Errors
    ///
    /// [`DataError::Encoding`] if the tokenizer refuses the ids.
    pub fn finish(&mut self) -> Result<String, DataError> {
        let ended = std::mem::replace(self, self.vocabulary.stream());
        let [all, given] = ended.decoded()?;
        Ok(all.strip_prefix(&given).unwrap_or_default().to_owned())
    }

    /// Text of all ids, and of those already returned.
    fn decoded(&self) -> Result<[String; 2], DataError> {
        let given = self.vocabulary.decode(&self.ids[..self.given])?;
        Ok([self.vocabulary.decode(&self.ids)?, given])
    }
}

/// Number of bytes without those of an incomplete last letter.
fn whole_letters(ids: &[u32]) -> usize {
    let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
    let last = bytes.utf8_chunks().last();
    let last = last.map_or(&[][..], |chunk| chunk.invalid());
    let goes_on = std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
    bytes.len() - if goes_on { last.len() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_of_bytes_shows_whole_letters_and_marks_what_is_none() {
        let vocabulary = Vocabulary::bytes().with_end(0).unwrap();
        let mut stream = vocabulary.stream();
        let bytes = "a€".bytes().chain([0xe2, b'b', 0xff, 0]);
        let shown = bytes.map(|byte| stream.push(byte.into()).unwrap());
        let shown: Vec<String> = shown.collect();
        assert_eq!(shown, ["a", "", "", "€", "", "\u{fffd}b", "\u{fffd}", ""]);
    }

    #[test]
    fn what_is_left_of_a_stream_of_bytes_is_shown_at_its_end() {
        let vocabulary = Vocabulary::bytes().with_end(0).unwrap();
        let mut stream = vocabulary.stream();
        let text = ["a€é😀".as_bytes(), &[0xff, 0xe2, b'b', 0xe2, 0]].concat();
        for end in 0..=text.len() {
            let ids: Vec<u32> = text[..end].iter().map(|&byte| byte.into()).collect();
            let shown: Result<String, _> = ids.iter().map(|&id| stream.push(id)).collect();
            let shown = shown.unwrap() + &stream.finish().unwrap();
            assert_eq!(shown, vocabulary.decode(&ids).unwrap(), "{end} bytes");
            assert_eq!(stream.finish().unwrap(), "");
        }
    }

    #[test]
    fn an_id_beyond_the_vocabulary_frames_nothing() {
        let error = Vocabulary::bytes().with_end(256).unwrap_err();
        assert_eq!(error.to_string(), "token 0 is 256, of a vocabulary of 256");
        assert!(Vocabulary::bytes().with_begin(u32::MAX).is_err());
        assert_eq!(Vocabulary::bytes().id("a"), Some(97));
        assert_eq!(Vocabulary::bytes().id("ab"), None);
    }

    #[test]
    fn a_text_without_ids_is_no_document() {
        let framed = Vocabulary::bytes().with_begin(1).unwrap();
        let framed = framed.with_end(2).unwrap();
        assert_eq!(framed.encode_document("x").unwrap(), [1, 120, 2]);
        assert!(framed.encode_document("").unwrap().is_empty());
        assert_eq!(framed.decode(&[1, 120, 2]).unwrap(), "x");
    }
}
