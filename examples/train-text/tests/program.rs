//! A run from its first step to a text, what it leaves behind, how it goes on, and the calls that documents show.
#![cfg(feature = "flex")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("train-text-{name}-{}", std::process::id()));
        fs::remove_dir_all(&dir).ok();
        fs::create_dir_all(&dir).expect("the folder can be written");
        Self(dir)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, text).expect("the folder is there");
        path.display().to_string()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn train_text(options: &str) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_train-text"));
    let output = program.args(options.split_whitespace()).output();
    output.expect("cargo has built the program")
}

fn succeeds(options: &str) -> String {
    let output = train_text(options);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{options}: {error}");
    String::from_utf8(output.stdout).expect("it prints text")
}

/// The one line on standard error, without the program's name and the newline.
fn refusal(options: &str) -> String {
    let output = train_text(options);
    let error = String::from_utf8(output.stderr).expect("it prints text");
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    let error = error.strip_prefix("train-text: ").expect("its name");
    error.trim_end().to_owned()
}

/// Sizes that train in a second without optimisation.
const TINY: &str = "--seq 24 --window 6 --batch 2 --layers 2 --d-model 16 --heads 2 --kv-heads 1 --steps 6 --evaluations 3";

/// What `book/src/gpu-run.md` says of a run, and `book/src/generation.md` of texts from it.
#[test]
fn a_run_leaves_checkpoints_writes_texts_and_goes_on_with_the_same_bits() {
    let scratch = Scratch::new("run");
    let text = scratch.file("text.txt", &"it was the best of times. ".repeat(50));
    let out = scratch.0.join("out");
    for more in ["--sample 40", "--dtype bf16 --checkpoint --sample 9"] {
        let place = format!("--data {text} --out {} {TINY} {more}", out.display());
        let printed = succeeds(&place);
        assert_eq!(printed.matches(", validation ").count(), 3, "{printed}");
        let read = |name: &str| fs::read(out.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (model, sample) = (read("model.bpk"), read("sample.txt"));
        read("config.json");
        assert!(!out.join("checkpoint-2").exists());

        // As if the run had been ended behind its second validation.
        fs::remove_dir_all(out.join("checkpoint-6")).expect("the last checkpoint");
        let printed = succeeds(&format!("{place} --resume"));
        assert_eq!(printed.matches(", validation ").count(), 1, "{printed}");
        assert!(read("model.bpk") == model && read("sample.txt") == sample);

        // A run that is complete only writes.
        let printed = succeeds(&format!(
            "{place} --resume --prompt times --temperature 0.5 --top-k 40 --top-p 0.9"
        ));
        assert!(!printed.contains(", validation "), "{printed}");
        assert!(printed.contains("--- prompt ---\ntimes\n--- sampled at temperature 0.5 ---\n"));
        let sample = String::from_utf8(read("sample.txt")).expect("a text");
        assert!(sample.starts_with("times") && sample.len() > 12, "{sample}");
        assert!(read("model.bpk") == model);

        let other = refusal(&format!("{place} --resume --lr 0.1"));
        assert!(other.starts_with("--resume: the run was of {"), "{other}");
        let longer = scratch.file("longer.txt", &"it was the age of wisdom. ".repeat(60));
        let changed = refusal(&format!("{} --resume", place.replace(&text, &longer)));
        assert!(
            changed.starts_with("the state is that of another loader"),
            "{changed}"
        );
    }
}

#[test]
fn a_text_that_repeats_is_learned() {
    let scratch = Scratch::new("learns");
    let text = scratch.file("text.txt", &"abcdefgh".repeat(200));
    let out = scratch.0.join("out");
    let sizes = "--seq 24 --window 6 --batch 4 --layers 1 --d-model 16 --heads 2 --kv-heads 1 --steps 60 --evaluations 1";
    let printed = succeeds(&format!(
        "--data {text} --out {} {sizes} --lr 2e-2",
        out.display()
    ));
    let loss = printed
        .split(", validation ")
        .nth(1)
        .and_then(|rest| rest.split(',').next());
    let loss: f64 = loss.and_then(|loss| loss.parse().ok()).expect("a loss");
    // Frequencies alone give the logarithm of eight.
    assert!(loss < 1.0, "{printed}");
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let scratch = Scratch::new("bad");
    let missing = scratch.0.join("missing.txt").display().to_string();
    assert!(refusal(&format!("--data {missing}")).starts_with(&missing));
    let tiny = scratch.file("tiny.txt", "too little");
    assert_eq!(
        refusal(&format!("--data {tiny}")),
        "10 bytes are too few for --seq 256: it takes 2570"
    );
    for options in ["--window 0", "--lr 0", "--lr NaN", "--steps 4"] {
        assert_eq!(
            refusal(&format!("--data {tiny} {options}")),
            "sizes and counts must be at least 1, --lr above 0 and at most 1, --steps at least --evaluations"
        );
    }
    #[cfg(not(feature = "cuda"))]
    assert_eq!(
        refusal(&format!("--data {tiny} --device cuda")),
        "--device cuda is not compiled in: build with --features cuda"
    );
    let out = scratch.0.join("out");
    let text = scratch.file("text.txt", &"it was the best of times. ".repeat(50));
    let error = refusal(&format!(
        "--data {text} --out {} {TINY} --resume",
        out.display()
    ));
    assert_eq!(error, "--resume: no checkpoint in --out");
    // Heads that do not divide are the layer's to refuse.
    refusal(
        &format!("--data {text} --out {} {TINY} --heads 3", out.display()).replacen(
            "--heads 2",
            "",
            1,
        ),
    );
}

/// With `--help` behind it a call is read and not carried out.
#[test]
fn calls_in_documents_are_read() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = 0;
    for document in [
        "book/src/gpu-run.md",
        "book/src/generation.md",
        "examples/README.md",
    ] {
        let text = fs::read_to_string(root.join(document)).expect("the document");
        // A call may go on in the next line.
        let text = text.replace("\\\n", " ");
        let calls = text.lines().filter(|line| {
            line.starts_with("cargo run ")
                && line.contains(" -p train-text")
                && line.contains(" -- ")
        });
        for line in calls {
            let line = line.split('#').next().unwrap_or_default();
            let options = line.split_once(" -- ").map_or("", |(_, options)| options);
            succeeds(&format!("{options} --help"));
            found += 1;
        }
    }
    assert!(found >= 6, "{found} calls were found");
}
