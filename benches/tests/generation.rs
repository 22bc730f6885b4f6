//! `bench-generation` runs, and prints the row that its readers expect.

use serde_json::Value;
use std::process::Command;

fn row(arguments: &[&str]) -> Value {
    let tiny = "--device flex --dtype f32 --d-model 32 --heads 2 --kv-heads 1 --layers 2 --prompt 40 --chunk 24 \
                --tokens 5 --runs 2 --warm-up 1";
    let output = Command::new(env!("CARGO_BIN_EXE_bench-generation"))
        .args(tiny.split_whitespace())
        .args(arguments)
        .output()
        .expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).expect("one row of JSON")
}

#[test]
fn every_way_of_timing_writes_the_same_tokens() {
    let row = row(&["--window", "8", "--batch", "3"]);
    assert_eq!(row["same_tokens"], true);
    let times = &row["token_ms"];
    assert_eq!(times["queued"]["runs"], 2);
    for way in [
        "token_read",
        "logits_read",
        "enqueue",
        "generated",
        "generated_replayed",
    ] {
        assert_eq!(times[way]["runs"], 5, "{way}");
    }
    let median = times["queued"]["median"].as_f64().expect("a number");
    let tokens = row["tokens_per_second"].as_f64().expect("a number");
    assert!((tokens * median / 1e3 - 3.0).abs() < 1e-6);
    // The caches of two layers: 3 sequences, one head of 16 features, 8 slots, f32, scores and positions.
    let bytes = 2 * (3 * 8 * (2 * 16 * 4 + 8) + 3 * 4);
    assert_eq!(row["cache_bytes"], bytes);
    // Flex launches nothing and has no graphs.
    assert_eq!(row["profile"], Value::Null);
    assert!(times["replayed"]["missing"].is_string(), "{times}");
}

#[test]
fn without_a_window_every_key_is_kept() {
    let row = row(&[]);
    assert_eq!(
        (&row["window"], &row["same_tokens"]),
        (&Value::Null, &true.into())
    );
    // 40 of the prompt, one of the warm-up, two runs of five tokens, and five of a capture.
    let keys = 40 + 1 + 2 * 5 + 5;
    assert_eq!(row["cache_bytes"], 2 * (keys * (2 * 16 * 4 + 8) + 4));
}
