//! A run from its first step to a text, with what it leaves behind, and the calls that documents show.
#![cfg(feature = "flex")]

use clap::Parser;
use std::fs;
use std::path::Path;
use std::process::Command;
use train_text::cli::{Cli, Settings};

fn train_text(options: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_train-text"))
        .args(options.split_whitespace())
        .output()
        .expect("cargo has built the program");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{options}: {error}");
    String::from_utf8(output.stdout).expect("it prints text")
}

/// What `book/src/gpu-run.md` says of a run, and `book/src/generation.md` of texts from it.
#[test]
fn a_run_leaves_logs_and_checkpoints_and_writes_texts() {
    let dir = std::env::temp_dir().join(format!("train-text-programs-{}", std::process::id()));
    fs::remove_dir_all(&dir).ok();
    fs::create_dir_all(&dir).expect("the folder can be written");
    let (text, out) = (dir.join("text.txt"), dir.join("out"));
    fs::write(&text, "it was the best of times. ".repeat(50)).expect("the folder is there");
    let place = format!("--data {} --out {}", text.display(), out.display());
    let printed = train_text(&format!(
        "{place} --dtype bf16 --checkpoint --seq 24 --window 6 --batch 2 --layers 2 --d-model 16 --heads 2 \
         --kv-heads 1 --steps 6 --evaluations 3 --sample 9"
    ));
    assert_eq!(printed.matches("  validation ").count(), 3, "{printed}");

    let run = out.join("sparse");
    let last = |log: &str| -> f64 {
        let path = run.join(log);
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{log}: {e}"));
        let number = text.lines().last().and_then(|line| line.split(',').next());
        let number = number.and_then(|number| number.parse().ok());
        number.unwrap_or_else(|| panic!("{log}: {text}"))
    };
    assert!(last("train/epoch-3/Gradient_of_scores.log") > 0.0);
    assert!(last("train/epoch-3/Learning_Rate.log") > 0.0);
    // 24 positions of a window of 6: 1 + 2 + 3 + 4 + 5 + 19 * 6 keys.
    assert_eq!(last("valid/epoch-3/Keys_alive.log"), 129.0 / 24.0);
    assert!(last("valid/epoch-3/Lifetime_of_keys.log") >= 129.0 / 24.0);
    assert!((0.0..=100.0).contains(&last("valid/epoch-3/Ties_of_scores.log")));
    for name in ["model", "optim", "scheduler"] {
        for epoch in [2, 3] {
            let file = run.join("checkpoint").join(format!("{name}-{epoch}.bpk"));
            assert!(file.exists(), "{}", file.display());
        }
    }

    // A run that is complete only writes.
    let printed = train_text(&format!(
        "{place} --resume --prompt times --sample 12 --temperature 0.5 --top-k 40 --top-p 0.9"
    ));
    assert!(!printed.contains("  validation "), "{printed}");
    assert!(printed.contains("--- prompt ---\ntimes\n--- sampled at temperature 0.5 ---\n"));
    let sample = fs::read_to_string(out.join("sample.txt")).expect("a text");
    assert!(sample.starts_with("times") && sample.len() > 12, "{sample}");
    fs::remove_dir_all(&dir).expect("the folder is there");
}

/// The options behind the name of this program in the lines of a document.
fn calls(document: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = fs::read_to_string(root.join(document)).expect("the document");
    // A call may go on in the next line.
    let text = text.replace("\\\n", " ");
    let options = |line: &str| {
        let line = line.split('#').next()?;
        let (program, options) = line.split_once(" -- ")?;
        let is_call = program.starts_with("cargo run ") && program.contains(" -p train-text");
        is_call.then(|| options.trim().to_string())
    };
    text.lines().filter_map(options).collect()
}

#[test]
fn calls_in_documents_are_settings_that_can_be_trained() {
    let mut found = 0;
    for document in ["book/src/gpu-run.md", "book/src/generation.md"] {
        for options in calls(document) {
            let cli =
                Cli::try_parse_from(["train-text"].into_iter().chain(options.split_whitespace()));
            let cli = cli.unwrap_or_else(|error| panic!("{document}: {error}"));
            if let Err(error) = Settings::new(&cli) {
                panic!("{document}: {options}: {error}");
            }
            found += 1;
        }
    }
    assert!(found >= 6, "{found} calls were found");
}
