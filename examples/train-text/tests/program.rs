//! A run from its first step to a text, its files, resuming, and the calls shown in documents.
#![cfg(feature = "flex")]

use std::fs;
use testing::{Program, Scratch};

#[path = "../../testing.rs"]
mod testing;

const TRAIN_TEXT: Program = Program(env!("CARGO_BIN_EXE_train-text"));

fn succeeds(options: &str) -> String {
    TRAIN_TEXT.printed(options, &[])
}

/// The one line on standard error, without the program's name and the newline.
fn refusal(options: &str) -> String {
    let error = TRAIN_TEXT.refused(options, &[]);
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

/// Sizes that train in a second without optimisation.
const TINY: &str = "--seq 24 --window 6 --batch 2 --layers 2 --d-model 16 --heads 2 --kv-heads 1 --steps 6 --evaluations 3";

/// The run of `book/src/gpu-run.md`, and the texts from it of `book/src/generation.md`.
#[test]
fn a_run_leaves_checkpoints_writes_texts_and_goes_on_with_the_same_bits() {
    let scratch = Scratch::new();
    let text = scratch.file("text.txt", "it was the best of times. ".repeat(50));
    let out = scratch.path("out");
    for more in ["--sample 40", "--dtype bf16 --checkpoint --sample 9"] {
        let place = format!("--data {text} --out {} {TINY} {more}", out.display());
        let printed = succeeds(&place);
        assert_eq!(printed.matches(", validation ").count(), 3, "{printed}");
        let read = |name: &str| fs::read(out.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (model, sample) = (read("model.bpk"), read("sample.txt"));
        read("config.json");
        assert!(!out.join("checkpoint/model-1.bpk").exists());

        // As if the run had been interrupted after its second validation.
        fs::remove_file(out.join("checkpoint/model-3.bpk")).expect("the last checkpoint");
        let printed = succeeds(&format!("{place} --resume"));
        assert_eq!(printed.matches(", validation ").count(), 1, "{printed}");
        assert!(read("model.bpk") == model && read("sample.txt") == sample);

        // A completed run only writes.
        let printed = succeeds(&format!(
            "{place} --resume --prompt times --temperature 0.5 --top-k 40 --top-p 0.9"
        ));
        assert!(!printed.contains(", validation "), "{printed}");
        assert!(printed.contains("--- prompt ---\ntimes\n--- sampled at temperature 0.5 ---\n"));
        let sample = String::from_utf8(read("sample.txt")).expect("a text");
        assert!(sample.starts_with("times") && sample.len() > 12, "{sample}");
        assert!(read("model.bpk") == model);

        let other = refusal(&format!("{place} --resume --lr 0.1"));
        let then = "the training that stopped had rate = 0.003, not 0.1: give it what it had";
        assert_eq!(other, then);
        let longer = scratch.file("longer.txt", "it was the age of wisdom. ".repeat(60));
        let changed = refusal(&format!("{} --resume", place.replace(&text, &longer)));
        let other = changed.starts_with("the training that stopped had text = {");
        assert!(other, "{changed}");
    }
}

#[test]
fn two_devices_and_texts_in_parts_train_the_same() {
    let scratch = Scratch::new();
    let text = scratch.file("text.txt", "it was the best of times. ".repeat(50));
    let options = [
        "--devices 0",
        "--devices 0,1",
        "--part 10",
        "--devices 0,1,2 --context-parallel",
    ];
    let printed = options.map(|options| {
        let out = scratch.text(&options.replace([' ', ','], "-"));
        let printed = succeeds(&format!(
            "--data {text} --out {out} {TINY} {options} --sample 9"
        ));
        let losses = printed
            .lines()
            .filter(|line| line.contains(", validation "));
        let losses = losses.map(|line| line.rsplit_once(", ").expect("a time").0.to_owned());
        losses.collect::<Vec<_>>()
    });
    assert_eq!(printed[0].len(), 3);
    for other in &printed[1..] {
        assert_eq!(&printed[0], other);
    }
}

#[test]
fn a_text_that_repeats_is_learned() {
    let scratch = Scratch::new();
    let text = scratch.file("text.txt", "abcdefgh".repeat(200));
    let sizes = "--seq 24 --window 6 --batch 4 --layers 1 --d-model 16 --heads 2 --kv-heads 1 --steps 60 --evaluations 1";
    let place = format!("--data {text} --out {}", scratch.text("out"));
    let printed = succeeds(&format!("{place} {sizes} --lr 2e-2"));
    let (_, loss) = printed.split_once(", validation ").expect("a loss");
    let loss: f64 = loss.split(',').next().unwrap().parse().expect("a number");
    // Frequencies alone give the logarithm of eight.
    assert!(loss < 1.0, "{printed}");
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let scratch = Scratch::new();
    let missing = scratch.text("missing.txt");
    assert!(refusal(&format!("--data {missing}")).starts_with(&missing));
    let tiny = scratch.file("tiny.txt", "too little");
    let error = refusal(&format!("--data {tiny}"));
    assert_eq!(
        error,
        "10 bytes are too few for texts of 256: it takes 2570"
    );
    for (options, steps, seq, rate) in [
        ("--seq 0 --window 6", 600, 0, "0.003"),
        ("--lr 0", 600, 256, "0"),
        ("--lr NaN", 600, 256, "NaN"),
        ("--steps 4", 4, 256, "0.003"),
    ] {
        let error = refusal(&format!("--data {tiny} {options}"));
        let rule = "sizes and counts must be at least 1, the rate above 0 and at most 1, steps at least evaluations";
        let given =
            format!("{steps} steps, 10 evaluations, texts of {seq} bytes, 8 a step, rate {rate}");
        assert_eq!(error, format!("{rule}: {given}"));
    }
    assert!(refusal(&format!("--data {tiny} --window 0")).contains("window"));
    if cfg!(not(feature = "cuda")) {
        let error = refusal(&format!("--data {tiny} --device cuda"));
        let expected = "--device cuda is not compiled in: build with --features cuda";
        assert_eq!(error, expected);
    }
    let text = scratch.file("text.txt", "it was the best of times. ".repeat(50));
    let place = format!("--data {text} --out {}", scratch.text("out"));
    let error = refusal(&format!("{place} {TINY} --resume"));
    assert_eq!(error, format!("{}: no checkpoint", scratch.text("out")));
    let error = refusal(&format!("{place} {TINY} --devices 0,1,2"));
    assert_eq!(error, "3 devices cannot share the 2 texts of a step evenly");
    let error = refusal(&format!("{place} {TINY} --part 0"));
    assert!(
        error.starts_with("sizes and counts must be at least 1"),
        "{error}"
    );
    // The layer refuses heads that do not divide.
    let wrong = TINY.replace("--heads 2", "--heads 3");
    refusal(&format!("{place} {wrong}"));
}

#[test]
fn calls_in_documents_are_read() {
    let pages = ["book/src/gpu-run", "book/src/generation", "examples/README"];
    let calls = TRAIN_TEXT.reads_calls_in(&pages);
    assert!(calls >= 6, "{calls} calls were found");
}
