//! The program: the rows it writes, how it goes on, what it says about bad input.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn lab(arguments: &str) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_lab"));
    program.args(arguments.split_whitespace()).output().unwrap()
}

/// Calls the program, and returns what it prints and the rows.
fn rows(out: &Path, arguments: &str) -> (String, Vec<Value>) {
    let output = lab(&format!("{arguments} --out {}", out.display()));
    assert!(output.status.success(), "{output:?}");
    let rows: Value = serde_json::from_str(&fs::read_to_string(out).unwrap()).unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    (printed, rows.as_array().expect("an array").clone())
}

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("lab-{name}-{}", std::process::id()))
}

/// The one line of an error.
fn refused(arguments: &str) -> String {
    let output = lab(arguments);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

#[test]
fn rows_of_recall_are_added_once() {
    let out = scratch("recall").join("rows.json");
    let options = "recall --size smallest --tokens 32 --shares 4 --steps 2 --batch 64 --arms";
    let (_, first) = rows(&out, &format!("{options} ours"));
    assert_eq!(first.len(), 1);
    let row = &first[0];
    for key in [
        "commit", "machine", "seconds", "seed", "rate", "accuracy", "cap",
    ] {
        assert!(!row[key].is_null(), "{key}: {row}");
    }
    assert_eq!((&row["arm"], &row["window"]), (&"ours".into(), &8.into()));
    let curve = row["curve"].as_array().unwrap();
    assert_eq!(curve.last().unwrap()["step"], row["steps_done"]);

    let (printed, both) = rows(&out, &format!("{options} sliding,ours"));
    assert!(printed.contains("has this row"), "{printed}");
    assert_eq!(both.len(), 2);
    assert_eq!(both[0], first[0], "the old row stays as it was");
    fs::remove_dir_all(out.parent().unwrap()).unwrap();
}

/// But for their order and their times.
#[test]
fn several_processes_make_the_rows_of_one() {
    let folder = scratch("processes");
    let made = |processes: usize| {
        let out = folder.join(format!("{processes}.json"));
        let options =
            "recall --size smallest --tokens 32 --shares 4 --steps 1 --batch 32 --seeds 3,4";
        let arguments = format!("{options} --arms ours,sliding --processes {processes}");
        let (printed, rows) = rows(&out, &arguments);
        assert_eq!(
            printed.matches(" step     1  loss ").count(),
            4,
            "{printed}"
        );
        let without_times = |mut row: Value| {
            let fields = row.as_object_mut().expect("a row");
            fields.retain(|name, _| name != "seconds" && name != "step_milliseconds");
            for point in fields["curve"].as_array_mut().expect("points") {
                point.as_object_mut().expect("a point").remove("seconds");
            }
            row.to_string()
        };
        let mut rows: Vec<String> = rows.into_iter().map(without_times).collect();
        rows.sort();
        rows
    };
    let (one, three) = (made(1), made(3));
    assert_eq!(one.len(), 4);
    assert_eq!(one, three);
    let files = fs::read_dir(&folder).unwrap();
    assert_eq!(files.count(), 2, "the rows, and nothing beside them");
    fs::remove_dir_all(folder).unwrap();
}

/// The processes open the device, and this build has none of this name.
#[test]
#[cfg(not(feature = "cuda"))]
fn what_a_process_says_is_the_error_of_the_program() {
    let out = scratch("failed").join("rows.json");
    let options = "recall --device cuda --arms ours,sliding --processes 2";
    let error = refused(&format!("{options} --out {}", out.display()));
    assert!(error.starts_with("lab: "), "{error}");
    assert!(error.contains("cuda"), "{error}");
    assert!(!out.exists());
    fs::remove_dir_all(out.parent().unwrap()).unwrap();
}

#[test]
fn bad_input_is_refused_in_one_line() {
    for (line, text) in [
        ("recall --tokens 64 --shares 32", "lab: --shares"),
        ("text --shares 64", "lab: --shares"),
        ("text --data /nowhere/at/all", "lab: /nowhere/at/all"),
    ] {
        let error = refused(line);
        assert!(error.starts_with(text), "{error}");
    }
    let dir = scratch("short");
    fs::create_dir_all(&dir).unwrap();
    let (text, out) = (dir.join("text.txt"), dir.join("rows.json"));
    fs::write(&text, "too short").unwrap();
    let error = refused(&format!(
        "text --data {} --out {}",
        text.display(),
        out.display()
    ));
    assert!(error.contains("9 bytes are too few"), "{error}");
    fs::remove_dir_all(dir).unwrap();
}

/// A folder with a text of some words.
fn with_text(name: &str) -> PathBuf {
    let dir = scratch(name);
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

/// The same of a program that reads the text of a folder.
fn rows_in(dir: &Path, arguments: &str) -> (String, Vec<Value>) {
    let data = dir.join("text.txt");
    rows(
        &dir.join("rows.json"),
        &format!("{arguments} --data {}", data.display()),
    )
}

#[test]
fn rows_of_text_are_added_once_and_compared() {
    let dir = with_text("text");
    let options = "text --tokens 64 --steps 2 --batch 2 --width 32 --heads 2 --shares 4 --texts 8";
    let saved = dir.join("models");
    let checkpoints = format!("--checkpoints {}", saved.display());
    let (_, first) = rows_in(&dir, &format!("{options} --arms ours {checkpoints}"));
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

    let (printed, all) = rows_in(&dir, options);
    assert!(printed.contains("has this row"), "{printed}");
    assert_eq!(printed.matches(" bytes: loss ").count(), 2 * 3, "{printed}");
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
    let dir = with_text("windows");
    let options = "text --tokens 64 --steps 2 --batch 2 --width 32 --heads 2 --shares 4 --texts 8";
    let arguments = format!("{options} --arms dense,ours --other-windows 16,64");
    let (printed, all) = rows_in(&dir, &arguments);
    let of_dense = all[0]["losses_by_window"].as_array().unwrap();
    assert!(of_dense.is_empty(), "dense has no window");
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
    let dir = with_text("needles");
    let options = "needles --steps 1 --batch 1 --texts 1 --width 32 --heads 2 --kv-heads 1";
    let (printed, all) = rows_in(&dir, &format!("{options} --arms dense,ours"));
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
