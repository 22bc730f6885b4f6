//! The program with and without a checkpoint, what it refuses, and the calls of it that documents show.
#![cfg(feature = "flex")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn endless<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_endless"))
        .args(arguments)
        .output()
        .expect("cargo has built the program")
}

/// A folder that does not exist yet.
fn fresh(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("endless-{name}-{}", std::process::id()));
    std::fs::remove_dir_all(&dir).ok();
    dir
}

/// Bytes of the caches of 3 layers of 2 kv heads: 64 slots of 2 * 32 * 4 + 8 bytes, and 4 bytes per layer.
const CACHES: usize = 3 * (2 * 64 * (2 * 32 * 4 + 8) + 4);

#[test]
fn a_model_is_trained_once_and_its_caches_stay_the_same_while_the_context_grows() {
    let dir = fresh("grows");
    std::fs::create_dir_all(&dir).expect("the folder can be written");
    let (text, out, json) = (dir.join("text.txt"), dir.join("out"), dir.join("log.json"));
    std::fs::write(&text, "once upon a time ".repeat(180)).expect("the folder can be written");
    let [text, out, json] = [text, out, json].map(|path| path.display().to_string());
    let run = |more: &[&str]| {
        let fixed = ["--data", &text, "--json", &json, "--context", "1200"];
        let output = endless([&fixed[..], more].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        let printed = String::from_utf8(output.stdout).expect("it prints text");
        let log = std::fs::read_to_string(&json).expect("`--json` writes a file");
        let stops = log
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        let stops: Vec<serde_json::Value> = stops.collect();
        // Of a line of the table: bytes of context and of caches.
        for stop in &stops {
            assert_eq!(stop["cache_bytes"], CACHES, "{stop}");
            let context = format!("{:>10} |", stop["context"].as_u64().expect("a number"));
            let row = printed.lines().find(|line| line.starts_with(&context));
            let row = row.unwrap_or_else(|| panic!("{context}: {printed}"));
            assert!(row.contains(&format!(" {CACHES} |")), "{row}");
        }
        let numbers = stops
            .iter()
            .map(|stop| ["context", "written"].map(|name| stop[name].as_u64().expect("a number")));
        (printed, numbers.collect::<Vec<_>>())
    };
    let options = [
        "--out", &out, "--steps", "1", "--write", "3", "--chunk", "300",
    ];
    let (printed, stops) = run(&options);
    assert!(
        printed.starts_with("no --checkpoint: training a small model"),
        "{printed}"
    );
    assert!(
        printed.contains("sparse (w = 64): validation loss"),
        "{printed}"
    );
    assert_eq!(stops, [[1024, 3], [1200, 3]]);

    let (printed, _) = run(&options);
    assert!(
        printed.starts_with("the model that was trained in "),
        "{printed}"
    );
    assert!(!printed.contains("validation loss"), "{printed}");

    let prompt = "once upon a time ".repeat(68);
    let options = [
        "--checkpoint",
        &out,
        "--write-only",
        "--quiet",
        "--prompt",
        &prompt,
    ];
    let (printed, stops) = run(&options);
    assert!(!printed.contains("trained in"), "{printed}");
    assert_eq!(stops, [[1156, 0], [1156, 44]]);
    std::fs::remove_dir_all(&dir).expect("the folder is there");
}

#[test]
fn what_cannot_be_done_is_refused_in_one_line() {
    let out = fresh("refused");
    let out = out.display().to_string();
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    for (arguments, text) in [
        (
            &["--chunk", "0"][..],
            "--chunk and --context must be at least 1",
        ),
        (&["--top-p", "1.5"], "--top-p must be between 0 and 1"),
        (
            &["--temperature", "NaN"],
            "--temperature must be at least 0",
        ),
        (&["--prompt", ""], "--prompt must not be empty"),
        (
            &["--out", &out, "--steps", "0"],
            "--steps must be at least 1",
        ),
        (
            &["--checkpoint", "/nowhere"],
            "/nowhere: no checkpoint of a `train-text` run",
        ),
    ] {
        let output = endless([&["--data", data], arguments].concat());
        assert_eq!(output.status.code(), Some(2));
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(error, format!("endless: {text}\n"));
    }
    assert!(!Path::new(&out).exists(), "nothing is written");
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
            let output = endless(options.split_whitespace().chain(["--help"]));
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{document}: {line}: {error}");
            calls += 1;
        }
    }
    assert!(calls >= 3, "{calls} calls were found");
}
