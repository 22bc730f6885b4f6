//! The program as a person meets it.
#![cfg(feature = "flex")]

use std::path::Path;
use std::process::{Command, Output};

fn endless(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_endless"))
        .args(arguments)
        .output()
        .unwrap()
}

/// A checkpoint of `train-text` of an untrained model: the sizes are what matters here.
fn checkpoint(dir: &Path) {
    use burn::module::Module;
    use clap::Parser;
    use train_text::cli::{Cli, Settings};
    use train_text::data::{Corpus, Text};
    use train_text::report::{self, CorpusFacts, Plan};
    let text = dir.join("text.txt");
    std::fs::write(&text, "once upon a time ".repeat(60)).unwrap();
    let corpus = Corpus::read(&text).unwrap();
    let options = "train-text --seq 16 --window 5 --batch 2 --layers 2 --d-model 16 --heads 2 --kv-heads 1 \
                   --steps 2 --evaluations 1";
    let settings = Settings::new(&Cli::parse_from(options.split_whitespace())).unwrap();
    let plan = Plan {
        corpus: CorpusFacts::of(&corpus),
        settings: settings.clone(),
        compare: false,
    };
    report::write_plan(dir, &plan).unwrap();
    let text = std::sync::Arc::new(Text::split(corpus, settings.seq).unwrap());
    let device = burn::prelude::Device::flex();
    let run = train_text::train::train(
        &settings,
        "sparse",
        &text,
        &device,
        &dir.join("sparse"),
        false,
    );
    assert!(run.unwrap().model.num_params() > 0);
}

#[test]
fn the_cache_stays_the_same_while_the_context_grows() {
    let dir = std::env::temp_dir().join(format!("endless-{}", std::process::id()));
    std::fs::remove_dir_all(&dir).ok();
    std::fs::create_dir_all(&dir).unwrap();
    checkpoint(&dir);
    let (path, text, json) = (
        dir.display().to_string(),
        dir.join("text.txt"),
        dir.join("log.json"),
    );
    let (text, json) = (text.display().to_string(), json.display().to_string());
    let run = |context: &str, more: &[&str]| {
        let fixed = [
            "--checkpoint",
            &path,
            "--data",
            &text,
            "--write",
            "5",
            "--json",
            &json,
        ];
        let output = endless(&[&fixed[..], &["--context", context], more].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        let log = std::fs::read_to_string(&json).unwrap();
        let stops = log.lines().map(|line| serde_json::from_str(line).unwrap());
        stops.collect::<Vec<serde_json::Value>>()
    };
    for more in [&["--chunk", "300"][..], &["--write-only", "--quiet"][..]] {
        let stops = run("1200", more);
        assert!(stops.len() >= 2, "{stops:?}");
        // 2 layers of one kv head: 5 slots of 2 * 8 * 4 + 8 bytes, and 4 a sequence.
        assert!(
            stops
                .iter()
                .all(|stop| stop["cache_bytes"] == 2 * (5 * 72 + 4))
        );
        assert!(
            stops
                .iter()
                .any(|stop| stop["context"].as_u64() >= Some(1024))
        );
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn what_cannot_be_done_is_refused_in_one_line() {
    for (arguments, text) in [
        (
            &["--chunk", "0"][..],
            "endless: --chunk and --context must be at least 1\n",
        ),
        (
            &["--top-p", "1.5"],
            "endless: --top-p must be between 0 and 1\n",
        ),
        (
            &["--temperature", "NaN"],
            "endless: --temperature must be at least 0\n",
        ),
        (&["--prompt", ""], "endless: --prompt must not be empty\n"),
        (
            &[
                "--checkpoint",
                "/nowhere",
                "--data",
                env!("CARGO_MANIFEST_DIR"),
            ],
            "endless: /nowhere: no checkpoint of a `train-text` run\n",
        ),
    ] {
        let output = endless(arguments);
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(String::from_utf8_lossy(&output.stderr), text);
    }
}
