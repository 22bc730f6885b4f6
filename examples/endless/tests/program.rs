//! The program as a person meets it.
#![cfg(feature = "flex")]

use burn::config::Config;
use burn::module::Module;
use burn::tensor::Device;
use burn_flash_dma::nn::DynamicMaskAttentionConfig;
use flash_dma_models::nn::DecoderConfig;
use std::path::Path;
use std::process::{Command, Output};

fn endless(arguments: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_endless"));
    let output = program.args(arguments).output();
    output.expect("cargo has built the program")
}

/// What a run of `train-text` leaves, of a model that has learned nothing: the sizes are what matters here.
fn checkpoint(dir: &Path) {
    let attention = DynamicMaskAttentionConfig::new(16, 2)
        .with_n_kv_heads(Some(1))
        .with_max_seq_len(Some(16))
        .with_keep_window(Some(5));
    let config = DecoderConfig::new(attention, 2);
    config.save(dir.join("config.json")).expect("it is written");
    let record = config.init(&Device::flex()).into_record();
    record.save(dir.join("model.bpk")).expect("it is written");
}

#[test]
fn the_cache_stays_the_same_while_the_context_grows() {
    let dir = std::env::temp_dir().join(format!("endless-{}", std::process::id()));
    std::fs::remove_dir_all(&dir).ok();
    std::fs::create_dir_all(&dir).expect("the folder can be written");
    checkpoint(&dir);
    let (text, json) = (dir.join("text.txt"), dir.join("log.json"));
    std::fs::write(&text, "once upon a time ".repeat(60)).expect("the folder is there");
    let [path, text, log] = [&dir, &text, &json].map(|path| path.display().to_string());
    for more in [&["--chunk", "300"][..], &["--write-only", "--quiet"]] {
        let place = ["--checkpoint", &path, "--data", &text, "--json", &log];
        let sizes = ["--write", "5", "--context", "1200"];
        let output = endless(&[&place[..], &sizes, more].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        let log = std::fs::read_to_string(&json).expect("it is written");
        let stops = log.lines().map(serde_json::from_str);
        let stops: Vec<serde_json::Value> = stops.map(|stop| stop.expect("JSON")).collect();
        assert!(stops.len() >= 2, "{stops:?}");
        // 2 layers of one kv head: 5 slots of 2 * 8 * 4 + 8 bytes, and 4 a sequence.
        let bytes = 2 * (5 * 72 + 4);
        assert!(
            stops.iter().all(|stop| stop["cache_bytes"] == bytes),
            "{stops:?}"
        );
        let mut contexts = stops.iter().map(|stop| stop["context"].as_u64());
        assert!(contexts.any(|context| context >= Some(1024)));
    }
    std::fs::remove_dir_all(&dir).expect("the folder is there");
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
        let output = endless(&[&["--data", data], &arguments[..]].concat());
        assert_eq!(output.status.code(), Some(2));
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            error.starts_with("endless: ") && error.contains(text),
            "{error}"
        );
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

/// With `--help` behind it a call is read and not carried out.
#[test]
fn calls_in_documents_are_read() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut calls = 0;
    for document in ["book/src/decoding.md", "book/src/generation.md"] {
        let text = std::fs::read_to_string(root.join(document)).expect("the document");
        for line in text.lines().filter(|line| line.contains(" -p endless")) {
            let line = line.split('#').next().unwrap_or_default();
            let options = line.split_once(" -- ").map_or("", |(_, options)| options);
            let options: Vec<&str> = options.split_whitespace().chain(["--help"]).collect();
            let output = endless(&options);
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{document}: {line}: {error}");
            calls += 1;
        }
    }
    assert!(calls >= 3, "{calls} calls were found");
}
