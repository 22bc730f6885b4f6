//! The program as a person meets it: the rows it writes, how it goes on, what it says about bad input.
#![cfg(feature = "flex")]

use clap::Parser;
use language::cli::Cli;
use language::settings::Task;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn language(arguments: &str) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_language"));
    program.args(arguments.split_whitespace()).output().unwrap()
}

/// A folder with a text of some words.
fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("language-{name}-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let words = [
        "winter ",
        "ran ",
        "over ",
        "the hill. ",
        "nobody ",
        "saw ",
        "rain, ",
    ];
    let text: String = (0..20_000u64)
        .map(|n| words[(n * n / 3 + n / 7) as usize % words.len()])
        .collect();
    fs::write(dir.join("text.txt"), text).unwrap();
    dir
}

/// Calls the program, and returns what it prints and the rows.
fn rows(dir: &Path, arguments: &str) -> (String, Vec<Value>) {
    let (data, out) = (dir.join("text.txt"), dir.join("rows.json"));
    let place = format!("--data {} --out {}", data.display(), out.display());
    let output = language(&format!("{arguments} {place}"));
    assert!(output.status.success(), "{output:?}");
    let rows: Value = serde_json::from_str(&fs::read_to_string(&out).unwrap()).unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    (printed, rows.as_array().expect("an array").clone())
}

#[test]
fn rows_of_text_are_added_once_and_compared() {
    let dir = scratch("text");
    let options = "text --tokens 64 --steps 2 --batch 2 --width 32 --heads 2 --share 4 --texts 8";
    let saved = dir.join("models");
    let checkpoints = format!("--checkpoints {}", saved.display());
    let (_, first) = rows(&dir, &format!("{options} --arms ours {checkpoints}"));
    assert_eq!(first.len(), 1);
    assert!(saved.join("text-ours-64-0.bpk").exists());
    let row = &first[0];
    for key in [
        "commit",
        "machine",
        "seconds",
        "seed",
        "rate",
        "corpus",
        "parameters",
    ] {
        assert!(!row[key].is_null(), "{key}: {row}");
    }
    assert_eq!((&row["arm"], &row["window"]), (&"ours".into(), &16.into()));
    assert_eq!(row["curve"].as_array().unwrap().last().unwrap()["step"], 2);
    // 1 + .. + 16 keys, then 16, in the mean over 64 positions.
    assert_eq!(row["by_layer"][0]["alive"], (136.0 + 48.0 * 16.0) / 64.0);
    let lengths: Vec<_> = (row["losses"].as_array().unwrap().iter())
        .map(|losses| {
            (
                losses["length"].as_u64(),
                losses["windows"].as_array().unwrap().len(),
            )
        })
        .collect();
    assert_eq!(lengths, [(Some(64), 8), (Some(256), 2)]);

    let (printed, all) = rows(&dir, options);
    assert!(printed.contains("has this row"), "{printed}");
    assert_eq!(printed.matches("to dense").count(), 4, "{printed}");
    assert_eq!(all.len(), 3);
    assert_eq!(all[0], first[0], "the old row stays as it was");
    let dense = &all[1];
    assert_eq!(dense["arm"], "dense");
    assert!(dense["window"].is_null() && dense["by_layer"][0].is_null());
    for row in &all {
        assert_eq!(row["parameters"], dense["parameters"]);
        // Of the same model, before its first step and after it has read nothing: the arms differ in the keys alone.
        let first = |row: &Value| row["curve"][0]["validation_loss"].as_f64().unwrap();
        assert!((first(row) - first(dense)).abs() < 0.02, "{row}");
    }
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_model_is_evaluated_with_other_windows_than_that_of_its_training() {
    let dir = scratch("windows");
    let options = "text --tokens 64 --steps 2 --batch 2 --width 32 --heads 2 --share 4 --texts 8";
    let arguments = format!("{options} --arms dense,ours --other-windows 16,64");
    let (printed, all) = rows(&dir, &arguments);
    assert!(all[0]["losses_by_window"].is_null(), "dense has no window");
    let [same, wider] = &all[1]["losses_by_window"].as_array().unwrap()[..] else {
        panic!("two windows: {printed}");
    };
    assert_eq!(
        (&same["window"], &wider["window"]),
        (&16.into(), &64.into())
    );
    let trained = &all[1]["losses"][0];
    assert_eq!(same["windows"], trained["windows"]);
    assert_eq!(same["bins"], trained["bins"]);
    assert_ne!(wider["windows"], trained["windows"]);
    assert_eq!(wider["length"], trained["length"]);
    assert!(printed.contains("with 64 keys: loss"), "{printed}");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn rows_of_needles_say_what_the_caches_hold() {
    let dir = scratch("needles");
    let options = "needles --steps 1 --batch 1 --texts 1 --width 32 --heads 2 --kv-heads 1";
    let (printed, all) = rows(&dir, &format!("{options} --arms dense,ours"));
    assert!(printed.contains("(8 x)"), "{printed}");
    assert_eq!(all.len(), 2);
    let bytes = |row: &Value| -> Vec<u64> {
        let caches = row["answers"]["caches"].as_array().unwrap();
        caches
            .iter()
            .map(|at| at["bytes"].as_u64().unwrap())
            .collect()
    };
    for row in &all {
        assert_eq!(
            row["answers"]["answered"].as_array().unwrap().len(),
            4 * 2 * 5
        );
        assert!(row["curve"][0]["answer_loss"].is_number(), "{row}");
    }
    let (dense, ours) = (bytes(&all[0]), bytes(&all[1]));
    // Half of a dense model's layers, the global ones, keep every token.
    assert!(dense[3] > 3 * dense[0], "{dense:?}");
    assert!(ours.iter().all(|&bytes| bytes == ours[0]), "{ours:?}");
    assert!(ours[0] < dense[0], "{ours:?} {dense:?}");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn bad_input_is_refused_in_one_line() {
    for (line, text) in [
        ("text --share 64", "language: --share"),
        ("text --data /nowhere/at/all", "language: /nowhere/at/all"),
    ] {
        let output = language(line);
        assert_eq!(output.status.code(), Some(2));
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.starts_with(text), "{error}");
    }
    let dir = scratch("short");
    fs::write(dir.join("text.txt"), "too short").unwrap();
    let output = language(&format!("text --data {}", dir.join("text.txt").display()));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.contains("9 bytes are too few"), "{error}");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn calls_in_the_book_are_runs() {
    let book = concat!(env!("CARGO_MANIFEST_DIR"), "/../../book/src/learning.md");
    let text = fs::read_to_string(book).expect("the chapter");
    let calls = text
        .lines()
        .filter_map(|line| line.strip_prefix("cargo run --release -p language -- "));
    let runs = calls.map(|call| {
        let options = call.split('#').next().unwrap_or_default();
        let cli = Cli::try_parse_from(["language"].into_iter().chain(options.split_whitespace()));
        let cli = cli.unwrap_or_else(|error| panic!("{call}: {error}"));
        let (task, options) = cli.options();
        let runs = options.runs(task, "");
        let runs = runs.unwrap_or_else(|error| panic!("{call}: {error}"));
        (task, runs.len())
    });
    let runs: Vec<(Task, usize)> = runs.collect();
    // Three arms on one seed.
    assert_eq!(runs, [(Task::Needles, 3), (Task::Text, 3)]);
}
