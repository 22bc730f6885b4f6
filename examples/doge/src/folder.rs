//! A checkpoint in Hugging Face's layout: the model, and the tokens that it speaks.

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, FloatDType};
use flash_dma_models::data::Vocabulary;
use flash_dma_models::doge::Doge;
use serde_json::Value;

use crate::error::Error;

/// The tokenizer's file in a folder.
pub const TOKENIZER: &str = "tokenizer.json";

/// Files that say how a folder's tokens are used, and that training does not change.
const BESIDE: [&str; 5] = [
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
];

/// A model with its vocabulary.
pub struct Folder {
    /// The model, with autodiff if the device has it.
    pub model: Doge,
    /// Its tokens; documents begin and end as the folder's files say.
    pub vocabulary: Vocabulary,
    /// The tokens that end a text.
    pub stops: Vec<u32>,
}

impl Folder {
    // ANCHOR: read
    /// Reads `config.json`, `model.safetensors` or its shards, and `tokenizer.json`. Parameters and activations are of
    /// `dtype`, whatever the files have.
    ///
    /// # Errors
    ///
    /// [`Error`] if a file is missing or is not what its name says, or the tokenizer has more tokens than the model.
    pub fn read(dir: &Path, dtype: FloatDType, device: &Device) -> Result<Self, Error> {
        let model = Doge::from_safetensors_as(dir, dtype, device)?;
        let path = dir.join(TOKENIZER);
        let mut vocabulary = Vocabulary::from_file(&path)?;
        let (tokens, rows) = (vocabulary.size(), model.config().vocab_size);
        if tokens > rows {
            let reason = format!("{tokens} tokens, but the model has {rows}");
            return Err(Error::Unusable { path, reason });
        }
        if let Some(begin) = first_token(&path)? {
            vocabulary = vocabulary.with_begin(begin)?;
        }
        let stops = model.config().end_tokens();
        let stops: Vec<u32> = stops.iter().map(|&token| token as u32).collect();
        if let Some(&end) = stops.first() {
            vocabulary = vocabulary.with_end(end)?;
        }
        Ok(Self {
            model,
            vocabulary,
            stops,
        })
    }
    // ANCHOR_END: read

    /// The tokens of a text that is to go on: with what begins a document, without what ends it.
    ///
    /// # Errors
    ///
    /// [`Error::Data`] if the tokenizer refuses the text.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        let begin = self.vocabulary.begin().into_iter();
        Ok(begin.chain(self.vocabulary.encode(text)?).collect())
    }
}

/// The token that the tokenizer's post-processor puts before a text, if it does.
fn first_token(path: &Path) -> Result<Option<u32>, Error> {
    let text = fs::read_to_string(path).map_err(Error::io(path))?;
    let file: Value = serde_json::from_str(&text).map_err(|error| Error::Unusable {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })?;
    let post = &file["post_processor"];
    let several = post["processors"].as_array();
    let mut all = several
        .map_or(std::slice::from_ref(post), Vec::as_slice)
        .iter();
    let Some(template) = all.find(|post| post["type"] == "TemplateProcessing") else {
        return Ok(None);
    };
    let name = template["single"][0]["SpecialToken"]["id"].as_str();
    let id = name.and_then(|name| template["special_tokens"][name]["ids"][0].as_u64());
    Ok(id.and_then(|id| u32::try_from(id).ok()))
}

/// Copies what a folder has beside its model.
///
/// # Errors
///
/// [`Error::Io`] if a file that is there cannot be copied.
pub fn copy_beside(from: &Path, to: &Path) -> Result<(), Error> {
    let files = BESIDE.iter().map(|name| (from.join(name), to.join(name)));
    for (source, copy) in files.filter(|(source, _): &(PathBuf, _)| source.exists()) {
        fs::copy(&source, &copy).map_err(Error::io(copy))?;
    }
    Ok(())
}
