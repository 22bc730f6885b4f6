//! `bench-step` runs, and prints the row that its readers expect.

use serde_json::Value;
use std::process::Command;

fn row(arguments: &[&str]) -> Value {
    let tiny = "--device flex --dtype f32 --seq 48 --d-model 32 --heads 2 --kv-heads 1 --layers 2 --steps 2 --warm-up 1";
    let output = Command::new(env!("CARGO_BIN_EXE_bench-step"))
        .args(tiny.split(' '))
        .args(arguments)
        .output()
        .expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).expect("one row of JSON")
}

#[test]
fn the_model_is_trained_and_timed() {
    let row = row(&["--window", "8", "--batch", "2"]);
    assert_eq!(
        (&row["implementation"], &row["what"]),
        (&"burn".into(), &"model".into())
    );
    assert_eq!((&row["window"], &row["seq"]), (&8.into(), &48.into()));
    assert_eq!(row["step_ms"]["runs"], 2);
    // Bytes that are all as likely.
    let first = row["losses"][0].as_f64().expect("a number");
    assert!((first - 256f64.ln()).abs() < 0.5, "{first}");
    let seconds = row["step_ms"]["median"].as_f64().expect("a number") / 1e3;
    let tokens = row["tokens_per_second"].as_f64().expect("a number");
    assert!((tokens * seconds - 96.0).abs() < 1e-6);
    assert!(row["first_step_ms"].as_f64().expect("a number") > 0.0);
    assert!(row["parameters"].as_u64().expect("a count") > 30_000);
}

#[test]
fn the_layer_is_trained_dense_if_no_window_is_given() {
    let row = row(&["--what", "layer"]);
    assert_eq!(
        (&row["what"], &row["window"]),
        (&"layer".into(), &Value::Null)
    );
    assert!(row["losses"][1].as_f64().expect("a number").is_finite());
}
