//! The program as a person meets it: what it writes, how it resumes, what it says about bad input.
#![cfg(feature = "flex")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Sizes that train in a second without optimisation.
const TINY: [&str; 16] = [
    "--seq",
    "24",
    "--batch",
    "2",
    "--layers",
    "1",
    "--d-model",
    "16",
    "--heads",
    "2",
    "--kv-heads",
    "1",
    "--steps",
    "4",
    "--evaluations",
    "2",
];

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir =
            std::env::temp_dir().join(format!("train-text-cli-{name}-{}", std::process::id()));
        fs::remove_dir_all(&dir).ok();
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn train_text(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_train-text"))
        .args(arguments)
        .output()
        .unwrap()
}

fn succeeds(arguments: &[&str]) -> String {
    let output = train_text(arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).unwrap()
}

/// The one line on standard error, without the program's name and the newline.
fn refusal(arguments: &[&str]) -> String {
    let output = train_text(arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    error
        .strip_prefix("train-text: ")
        .unwrap()
        .trim_end()
        .to_string()
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let scratch = Scratch::new("bad");
    let missing = scratch.path("missing.txt");
    assert!(refusal(&["--data", &missing]).starts_with(&missing));
    let empty = scratch.file("empty.txt", "");
    assert_eq!(
        refusal(&["--data", &empty]),
        format!("{empty}: no text to train on")
    );
    let tiny = scratch.file("tiny.txt", "too little");
    assert_eq!(
        refusal(&["--data", &tiny]),
        format!("{tiny}: 10 bytes are too few for --seq 256: at least 2570 are needed")
    );
    let out = scratch.path("out");
    assert!(refusal(&["--data", &tiny, "--out", &out, "--resume"]).contains("plan.json"));
    assert!(
        !Path::new(&out).exists(),
        "nothing is written for bad input"
    );
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_device_that_is_not_compiled_in_is_refused_in_one_line() {
    let scratch = Scratch::new("device");
    let text = scratch.file("text.txt", "some text");
    assert_eq!(
        refusal(&["--data", &text, "--device", "cuda"]),
        "--device cuda is not compiled in: build with --features cuda"
    );
}

#[test]
fn a_comparison_trains_both_writes_its_results_and_resumes() {
    let scratch = Scratch::new("compare");
    let text = "it was the best of times, it was the worst of times. ".repeat(20);
    let text = scratch.file("text.txt", &text);
    let out = scratch.path("out");
    let place = ["--data", &text, "--out", &out, "--sample", "8"];
    let printed = succeeds(&[&place[..], &TINY, &["--compare"]].concat());
    assert!(printed.contains("byte-unigram entropy"));
    assert!(printed.contains("sparse (w = 6): validation loss"));
    assert!(printed.contains("dense (w = 24): validation loss"));
    let read = |name: &str| fs::read(Path::new(&out).join(name)).unwrap();
    assert!(read("curves.png").starts_with(b"\x89PNG"));
    let json: serde_json::Value = serde_json::from_slice(&read("curves.json")).unwrap();
    let runs = json["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    for run in runs {
        assert_eq!(run["train"].as_array().unwrap().len(), 4);
        assert_eq!(run["valid"].as_array().unwrap().len(), 2);
    }
    let sample = read("sample.txt");

    // The run is complete: resuming it trains nothing, and samples the same from the checkpoint.
    let again = succeeds(&[&place[..], &["--resume"]].concat());
    assert!(!again.contains("step "), "{again}");
    assert_eq!(read("sample.txt"), sample);
    let other = refusal(&[&place[..], &["--resume", "--seed", "7"]].concat());
    assert!(other.ends_with("leave them out"), "{other}");
    fs::write(&text, "it was the age of wisdom. ".repeat(50)).unwrap();
    let changed = refusal(&[&place[..], &["--resume"]].concat());
    assert!(
        changed.ends_with("the text has changed since the run began"),
        "{changed}"
    );
}
