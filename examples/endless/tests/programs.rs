//! The program without a checkpoint, and the calls of it that documents show.
#![cfg(feature = "flex")]

use std::path::Path;
use std::process::{Command, Output};

fn endless<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_endless"))
        .args(arguments)
        .output()
        .expect("cargo has built the program")
}

#[test]
fn a_model_is_trained_once_and_found_the_second_time() {
    let dir = std::env::temp_dir().join(format!("endless-programs-{}", std::process::id()));
    std::fs::remove_dir_all(&dir).ok();
    std::fs::create_dir_all(&dir).expect("the folder can be written");
    let (text, out) = (dir.join("text.txt"), dir.join("out"));
    std::fs::write(&text, "once upon a time ".repeat(180)).expect("the folder can be written");
    let [text, out] = [text, out].map(|path| path.display().to_string());
    let run = || {
        let options = ["--data", &text, "--out", &out, "--steps", "1"];
        let sizes = ["--context", "300", "--write", "3", "--chunk", "64"];
        let output = endless([options, sizes].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        String::from_utf8(output.stdout).expect("it prints text")
    };
    let (first, second) = (run(), run());
    assert!(
        first.starts_with("no --checkpoint: training a small model"),
        "{first}"
    );
    assert!(
        first.contains("sparse (w = 64): validation loss"),
        "{first}"
    );
    assert!(
        second.starts_with("the model that was trained in "),
        "{second}"
    );
    assert!(!second.contains("validation loss"), "{second}");
    // 3 layers of 2 kv heads: 64 slots of 2 * 32 * 4 + 8 bytes, and 4 bytes per layer.
    let bytes = 3 * (2 * 64 * (2 * 32 * 4 + 8) + 4);
    for printed in [first, second] {
        let stop = printed
            .lines()
            .find(|line| line.starts_with("       300 |"));
        let stop = stop.expect("the stop at 300 bytes");
        let columns: Vec<&str> = stop.split('|').map(str::trim).collect();
        assert_eq!(
            (columns[2], columns[5]),
            ("3", bytes.to_string().as_str()),
            "{printed}"
        );
    }
    std::fs::remove_dir_all(&dir).expect("the folder is there");
}

#[test]
fn a_model_is_not_trained_for_no_steps() {
    let out = std::env::temp_dir().join(format!("endless-no-steps-{}", std::process::id()));
    let out = out.display().to_string();
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let output = endless(["--data", data, "--out", &out, "--steps", "0"]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(error, "endless: --steps must be at least 1\n");
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
