//! The program as a person meets it: the rows it writes, how it goes on, what it says about bad input.
#![cfg(feature = "flex")]

use std::process::{Command, Output};

fn recall(arguments: &str) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_recall"));
    program.args(arguments.split_whitespace()).output().unwrap()
}

#[test]
fn rows_are_added_once() {
    let out = std::env::temp_dir().join(format!("recall-cli-{}/rows.json", std::process::id()));
    let options = "--size smallest --tokens 32 --shares 4 --steps 2 --batch 64 --arms";
    let run = |arms: &str| {
        let output = recall(&format!("{options} {arms} --out {}", out.display()));
        assert!(output.status.success(), "{output:?}");
        let rows = std::fs::read_to_string(&out).unwrap();
        let rows: serde_json::Value = serde_json::from_str(&rows).unwrap();
        let rows = rows.as_array().expect("an array").clone();
        (String::from_utf8(output.stdout).unwrap(), rows)
    };
    let (_, first) = run("ours");
    assert_eq!(first.len(), 1);
    let row = &first[0];
    for key in ["commit", "machine", "seconds", "seed", "rate", "accuracy"] {
        assert!(!row[key].is_null(), "{key}: {row}");
    }
    assert_eq!(row["arm"], "ours");
    assert_eq!(row["window"], 8);
    let curve = row["curve"].as_array().unwrap();
    assert_eq!(curve.last().unwrap()["step"], row["steps_done"]);

    let (printed, both) = run("sliding,ours");
    assert!(printed.contains("has this row"), "{printed}");
    assert_eq!(both.len(), 2);
    assert_eq!(both[0], first[0], "the old row stays as it was");
    std::fs::remove_dir_all(out.parent().unwrap()).unwrap();
}

/// But for their order and their times.
#[test]
fn several_processes_make_the_rows_of_one() {
    let folder = std::env::temp_dir().join(format!("recall-processes-{}", std::process::id()));
    let rows = |processes: usize| {
        let out = folder.join(format!("{processes}.json"));
        let options = "--size smallest --tokens 32 --shares 4 --steps 1 --batch 32 --seeds 3,4";
        let arms = "--arms ours,sliding";
        let output = recall(&format!(
            "{options} {arms} --processes {processes} --out {}",
            out.display()
        ));
        assert!(output.status.success(), "{output:?}");
        let printed = String::from_utf8(output.stdout).unwrap();
        assert_eq!(
            printed.matches(" step     1  loss ").count(),
            4,
            "{printed}"
        );
        let rows: Vec<serde_json::Value> =
            serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap();
        let mut rows: Vec<String> = (rows.into_iter())
            .map(|mut row| {
                for time in ["seconds", "step_milliseconds"] {
                    row.as_object_mut().expect("a row").remove(time);
                }
                row.to_string()
            })
            .collect();
        rows.sort();
        rows
    };
    let (one, three) = (rows(1), rows(3));
    assert_eq!(one.len(), 4);
    assert_eq!(one, three);
    let files = std::fs::read_dir(&folder).unwrap();
    assert_eq!(files.count(), 2, "the rows, and nothing beside them");
    std::fs::remove_dir_all(folder).unwrap();
}

/// The processes open the device, and this build has none of this name.
#[test]
#[cfg(not(feature = "cuda"))]
fn what_a_process_says_is_the_error_of_the_program() {
    let out = std::env::temp_dir().join(format!("recall-failed-{}/rows.json", std::process::id()));
    let options = "--device cuda --arms ours,sliding --processes 2";
    let output = recall(&format!("{options} --out {}", out.display()));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("recall: "), "{error}");
    assert!(error.contains("cuda"), "{error}");
    assert!(!out.exists());
    std::fs::remove_dir_all(out.parent().unwrap()).unwrap();
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let output = recall("--tokens 64 --shares 32");
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("recall: --shares 32"), "{error}");
}
