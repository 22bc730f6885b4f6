//! `doge fresh`: a new folder to try the other commands on.

use std::fs;
use std::path::PathBuf;

use clap::Parser;
use flash_dma_models::doge::{DogeConfig, RopeScaling};
use serde_json::{Map, Value, json};

use crate::{Error, Place, at};

/// The token before every text; those below are bytes.
const BEGIN: (&str, u32) = ("<|begin_of_text|>", 256);

/// The token after every document, the last of the vocabulary.
const END: (&str, u32) = ("<|end_of_text|>", 257);

/// Writes a small model with random parameters and a tokenizer of bytes.
#[derive(Debug, Parser)]
pub struct Cli {
    /// Folder for the model.
    dir: PathBuf,
    /// Seed of the parameters.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    place: Place,
}

/// Writes a model of 64 features and two blocks, whose queries keep 32 keys.
pub fn run(cli: &Cli) -> Result<(), Error> {
    let other = json!({"bos_token_id": BEGIN.1, "eos_token_id": END.1});
    let config = DogeConfig::new(64, 2, 4)
        .with_kv_heads(Some(2))
        .with_vocab_size(END.1 as usize + 1)
        .with_keep_window_size(32)
        .with_max_position_embeddings(512)
        .with_rope_scaling(RopeScaling::Dynamic(4.0))
        .with_tie_word_embeddings(true)
        .with_other(other.as_object().cloned().unwrap_or_default());
    let (device, _) = cli.place.open()?;
    device.seed(cli.seed);
    config.try_init(&device)?.save_safetensors(&cli.dir)?;
    let path = cli.dir.join("tokenizer.json");
    fs::write(&path, format!("{:#}\n", tokenizer())).map_err(at(&path))
}

/// A `tokenizer.json` with a token for each byte, one for the beginning and one for the end.
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

/// The character that a tokenizer of bytes uses for a byte: its own if printable, otherwise, in order, one from 256
/// on.
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
