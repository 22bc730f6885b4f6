//! A small Doge with random parameters and a tokenizer of bytes: a folder to try the programs on, where there is none.

use std::fs;
use std::path::Path;

use burn::tensor::Device;
use flash_dma_models::doge::{DogeConfig, RopeScaling};
use serde_json::{Map, Value, json};

use crate::error::Error;
use crate::folder::TOKENIZER;

/// The token before every text; those below are the bytes.
const BEGIN: (&str, u32) = ("<|begin_of_text|>", 256);

/// The token behind every document.
const END: (&str, u32) = ("<|end_of_text|>", 257);

/// The tokens of the vocabulary.
const TOKENS: usize = 258;

/// A model of 64 features and two blocks, whose queries keep 32 keys.
pub fn config() -> DogeConfig {
    let other = json!({"bos_token_id": BEGIN.1, "eos_token_id": END.1});
    DogeConfig::new(64, 2, 4)
        .with_kv_heads(Some(2))
        .with_vocab_size(TOKENS)
        .with_keep_window_size(32)
        .with_max_position_embeddings(512)
        .with_rope_scaling(RopeScaling::Dynamic(4.0))
        .with_tie_word_embeddings(true)
        .with_other(other.as_object().cloned().unwrap_or_default())
}

/// Writes a model of this configuration, random by `seed`, and the tokenizer into `dir`, which is made if it is not
/// there.
///
/// # Errors
///
/// [`Error`] if the configuration is refused or a file cannot be written.
pub fn write(dir: &Path, config: &DogeConfig, seed: u64, device: &Device) -> Result<(), Error> {
    device.seed(seed);
    config.try_init(device)?.save_safetensors(dir)?;
    let path = dir.join(TOKENIZER);
    fs::write(&path, format!("{:#}\n", tokenizer())).map_err(Error::io(path))
}

/// A `tokenizer.json` whose tokens are bytes, and one each for the beginning and the end.
fn tokenizer() -> Value {
    let vocabulary: Map<String, Value> = (0..=u8::MAX)
        .map(|byte| (letter(byte).to_string(), json!(byte)))
        .collect();
    let special = |(content, id): (&str, u32)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let (name, id) = BEGIN;
    let sequence = |name, id| json!({"Sequence": {"id": name, "type_id": id}});
    let begin = json!({"SpecialToken": {"id": name, "type_id": 0}});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(BEGIN), special(END)],
        "normalizer": null,
        "pre_tokenizer": bytes,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, sequence("A", 0)],
            "pair": [begin, sequence("A", 0), sequence("B", 1)],
            "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]}},
        },
        "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": [],
        },
    })
}

/// How a tokenizer of bytes writes a byte: the letter of its number if that can be seen, or else, in the order of the
/// bytes, one from 256 on.
fn letter(byte: u8) -> char {
    let seen = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    match seen(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|&other| !seen(other)).count() as u32;
            char::from_u32(256 + before).expect("the letters from 256 to 323 exist")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_byte_has_a_letter_of_its_own() {
        let letters: HashSet<char> = (0..=u8::MAX).map(letter).collect();
        assert_eq!(letters.len(), 256);
        assert_eq!([letter(b'a'), letter(b' '), letter(b'\n')], ['a', 'Ġ', 'Ċ']);
    }
}
