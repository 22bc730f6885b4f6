//! The program: its rows, resuming, and errors for bad input.

use crate::testing::{Program, Scratch};
use serde_json::Value;
use std::fs;

const LAB: Program = Program(env!("CARGO_BIN_EXE_lab"));

/// Calls the program; returns its output and the rows of a file.
fn rows_of(dir: &Scratch, file: &str, arguments: &str) -> (String, Vec<Value>) {
    let out = dir.text(file);
    let printed = LAB.printed(arguments, &["--out", &out]);
    let rows: Value = serde_json::from_str(&fs::read_to_string(out).unwrap()).unwrap();
    (printed, rows.as_array().expect("an array").clone())
}

fn rows(dir: &Scratch, arguments: &str) -> (String, Vec<Value>) {
    rows_of(dir, "rows.json", arguments)
}

fn assert_has(row: &Value, keys: &str) {
    for key in keys.split(' ') {
        assert!(!row[key].is_null(), "{key}: {row}");
    }
}

/// The one line of an error.
fn refused(arguments: &str) -> String {
    let error = LAB.refused(arguments, &[]);
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

#[test]
fn rows_of_recall_are_added_once() {
    let dir = Scratch::new();
    let options = "recall --size smallest --tokens 32 --shares 4 --steps 2 --batch 64 --arms";
    let (_, first) = rows(&dir, &format!("{options} ours"));
    assert_eq!(first.len(), 1);
    let row = &first[0];
    assert_has(row, "commit machine seconds seed rate accuracy cap");
    assert_eq!((&row["arm"], &row["window"]), (&"ours".into(), &8.into()));
    let curve = row["curve"].as_array().unwrap();
    assert_eq!(curve.last().unwrap()["step"], row["steps_done"]);

    let (printed, both) = rows(&dir, &format!("{options} sliding,ours"));
    assert!(printed.contains("has this row"), "{printed}");
    assert_eq!(both.len(), 2);
    assert_eq!(both[0], first[0], "the old row stays as it was");
}

/// Except for their order and times.
#[test]
fn several_processes_make_the_rows_of_one() {
    let dir = Scratch::new();
    let options = "recall --size smallest --tokens 32 --shares 4 --steps 1 --batch 32 --seeds 3,4";
    let made = |processes: usize| {
        let arguments = format!("{options} --arms ours,sliding --processes {processes}");
        let (printed, rows) = rows_of(&dir, &format!("{processes}.json"), &arguments);
        let steps = printed.matches(" step     1  loss ").count();
        assert_eq!(steps, 4, "{printed}");
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
    let files = fs::read_dir(dir.path("")).unwrap();
    assert_eq!(files.count(), 2, "the rows, and nothing else");
}

/// The processes open the device, and this build has none of this name.
#[test]
#[cfg(not(feature = "cuda"))]
fn what_a_process_says_is_the_error_of_the_program() {
    let dir = Scratch::new();
    let options = "recall --device cuda --arms ours,sliding --processes 2";
    let error = refused(&format!("{options} --out {}", dir.text("rows.json")));
    assert!(error.contains("cuda"), "{error}");
    assert!(!dir.path("rows.json").exists());
}

#[test]
fn bad_input_is_refused_in_one_line() {
    for (line, text) in [
        ("recall --tokens 64 --shares 32", "--shares"),
        ("text --shares 64", "--shares"),
        ("text --data /nowhere/at/all", "/nowhere/at/all"),
    ] {
        let error = refused(line);
        assert!(error.starts_with(text), "{error}");
    }
    let dir = Scratch::new();
    let (text, out) = (dir.file("text.txt", "too short"), dir.text("rows.json"));
    let error = refused(&format!("text --data {text} --out {out}"));
    assert!(error.contains("9 bytes are too few"), "{error}");
}

/// A folder, and the option that names a text in it of some words.
fn with_text() -> (Scratch, String) {
    let dir = Scratch::new();
    let words = "winter |ran |over |the hill. |nobody |saw |rain, ";
    let words: Vec<&str> = words.split('|').collect();
    let text: String = (0..20_000u64)
        .map(|n| words[(n * n / 3 + n / 7) as usize % words.len()])
        .collect();
    let option = format!("--data {}", dir.file("text.txt", text));
    (dir, option)
}

/// Settings shared by most of the runs on a text.
const TEXT: &str = "text --tokens 64 --steps 2 --batch 2 --width 32 --heads 2 --shares 4 --texts 8";

#[test]
fn rows_of_text_are_added_once() {
    let (dir, data) = with_text();
    let options = format!("{TEXT} {data}");
    let checkpoints = format!("--checkpoints {}", dir.text("models"));
    let (_, first) = rows(&dir, &format!("{options} --arms ours {checkpoints}"));
    assert_eq!(first.len(), 1);
    assert!(dir.path("models/text-ours-64-0.bpk").exists());
    let row = &first[0];
    assert_has(row, "commit machine seconds seed rate corpus parameters");
    assert_eq!((&row["arm"], &row["window"]), (&"ours".into(), &16.into()));
    assert_eq!(row["curve"].as_array().unwrap().last().unwrap()["step"], 2);
    // 1 + .. + 16 keys, then 16, in the mean over 64 positions.
    assert_eq!(row["by_layer"][0]["alive"], (136.0 + 48.0 * 16.0) / 64.0);
    for (losses, (length, windows)) in [(64, 8), (256, 2)].into_iter().enumerate() {
        let losses = &row["losses"][losses];
        assert_eq!(losses["length"], length);
        assert_eq!(losses["windows"].as_array().unwrap().len(), windows);
    }
    assert!(row["losses"][2].is_null());

    let (printed, all) = rows(&dir, &options);
    assert!(printed.contains("has this row"), "{printed}");
    assert_eq!(printed.matches(" bytes: loss ").count(), 2 * 3, "{printed}");
    assert_eq!(all.len(), 3);
    assert_eq!(all[0], first[0], "the old row stays as it was");
    let dense = &all[1];
    assert_eq!(dense["arm"], "dense");
    assert!(dense["window"].is_null() && dense["by_layer"][0].is_null());
    for row in &all {
        assert_eq!(row["parameters"], dense["parameters"]);
        // The same model before its first step, with nothing read: the arms differ only in the keys.
        let first = |row: &Value| row["curve"][0]["validation_loss"].as_f64().unwrap();
        assert!((first(row) - first(dense)).abs() < 0.02, "{row}");
    }
}

#[test]
fn a_model_is_evaluated_with_other_windows_than_that_of_its_training() {
    let (dir, data) = with_text();
    let arguments = format!("{TEXT} {data} --arms dense,ours --other-windows 16,64");
    let (printed, all) = rows(&dir, &arguments);
    let of_dense = all[0]["losses_by_window"].as_array().unwrap();
    assert!(of_dense.is_empty(), "dense has no window");
    let [same, wider] = &all[1]["losses_by_window"].as_array().unwrap()[..] else {
        panic!("two windows: {printed}");
    };
    assert_eq!([&same["window"], &wider["window"]], [16, 64]);
    let trained = &all[1]["losses"][0];
    assert_eq!(same["windows"], trained["windows"]);
    assert_eq!(same["bins"], trained["bins"]);
    assert_ne!(wider["windows"], trained["windows"]);
    assert_eq!(wider["length"], trained["length"]);
    assert!(printed.contains("with 64 keys: loss"), "{printed}");
}

#[test]
fn rows_of_needles_say_what_the_caches_hold() {
    let (dir, data) = with_text();
    let options = "needles --steps 1 --batch 1 --texts 1 --width 32 --heads 2 --kv-heads 1";
    let (printed, all) = rows(&dir, &format!("{options} {data} --arms dense,ours"));
    assert!(printed.contains("(8 x)"), "{printed}");
    assert_eq!(all.len(), 2);
    let bytes = |row: &Value| -> Vec<u64> {
        let caches = row["answers"]["caches"].as_array().unwrap().iter();
        caches.map(|at| at["bytes"].as_u64().unwrap()).collect()
    };
    for row in &all {
        let answered = row["answers"]["answered"].as_array().unwrap();
        assert_eq!(answered.len(), 4 * 2 * 5);
        assert!(row["curve"][0]["answer_loss"].is_number(), "{row}");
    }
    let (dense, ours) = (bytes(&all[0]), bytes(&all[1]));
    // Half of a dense model's layers, the global ones, keep every token.
    assert!(dense[3] > 3 * dense[0], "{dense:?}");
    assert!(ours.iter().all(|&bytes| bytes == ours[0]), "{ours:?}");
    assert!(ours[0] < dense[0], "{ours:?} {dense:?}");
}
