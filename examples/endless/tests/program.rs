//! The program as a user runs it.
#![cfg(feature = "flex")]

use burn::config::Config;
use burn::module::Module;
use burn::tensor::Device;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Selection};
use flash_dma_models::nn::DecoderConfig;
use testing::{Program, Scratch};

#[path = "../../testing.rs"]
mod testing;

const ENDLESS: Program = Program(env!("CARGO_BIN_EXE_endless"));

/// Files of a `train-text` run with an untrained model: only the sizes matter here.
fn checkpoint(dir: &Scratch) {
    let attention = DynamicMaskAttentionConfig::new(16, 2)
        .with_n_kv_heads(Some(1))
        .with_rope(Some(Rope::new(16)))
        .with_selection(Selection::keep(5));
    let config = DecoderConfig::new(attention, 2).with_local_window(None);
    config.save(dir.path("config.json")).expect("it is written");
    let record = config.init(&Device::flex()).into_record();
    record.save(dir.path("model.bpk")).expect("it is written");
}

#[test]
fn the_cache_stays_the_same_while_the_context_grows() {
    let dir = Scratch::new();
    checkpoint(&dir);
    let text = dir.file("text.txt", "once upon a time ".repeat(60));
    let [path, log] = ["", "log.json"].map(|name| dir.text(name));
    for more in [&["--chunk", "300"][..], &["--write-only", "--quiet"]] {
        let place = ["--checkpoint", &path, "--data", &text, "--json", &log];
        let sizes = ["--write", "5", "--context", "1200"];
        ENDLESS.printed("", &[&place[..], &sizes, more].concat());
        let log = std::fs::read_to_string(&log).expect("it is written");
        let stops = log.lines().map(serde_json::from_str);
        let stops: Vec<serde_json::Value> = stops.map(|stop| stop.expect("JSON")).collect();
        assert!(stops.len() >= 2, "{stops:?}");
        // 2 layers of one kv head: 5 slots of 2 * 8 * 4 + 8 bytes, and 4 a sequence.
        let bytes = 2 * (5 * 72 + 4);
        let same = stops.iter().all(|stop| stop["cache_bytes"] == bytes);
        assert!(same, "{stops:?}");
        let mut contexts = stops.iter().map(|stop| stop["context"].as_u64());
        assert!(contexts.any(|context| context >= Some(1024)));
    }
}

#[test]
fn what_cannot_be_done_is_refused_in_one_line() {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    for (arguments, text) in [
        (["--chunk", "0"], "--chunk and --context must be at least 1"),
        (["--top-p", "1.5"], "top_p"),
        (["--temperature", "NaN"], "temperature"),
        (["--prompt", ""], "the text and --prompt must not be empty"),
        (
            ["--checkpoint", "/nowhere"],
            "/nowhere: no `train-text` run that has ended",
        ),
    ] {
        let error = ENDLESS.refused("--data", &[&[data], &arguments[..]].concat());
        assert!(error.contains(text), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn calls_in_documents_are_read() {
    let calls = ENDLESS.reads_calls_in(&["book/src/decoding", "book/src/generation"]);
    assert!(calls >= 3, "{calls} calls were found");
}
