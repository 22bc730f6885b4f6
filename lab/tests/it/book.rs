//! The program's calls shown in the book.

use burn_flash_dma::nn::{ScoreLearning, Scores, Selection};
use clap::{Parser, ValueEnum};
use lab::arm::Arm;
use lab::cli::Cli;
use lab::settings::{Settings, Task};

const BOOK: &str = include_str!("../../../book/src/learning.md");

fn runs(line: &str, options: &str) -> (Cli, Vec<Settings>) {
    let cli = Cli::try_parse_from(["lab"].into_iter().chain(options.split_whitespace()));
    let cli = cli.unwrap_or_else(|error| panic!("{line}: {error}"));
    let (task, options) = cli.options();
    let runs = options.runs(task, "");
    let runs = runs.unwrap_or_else(|error| panic!("{line}: {error}"));
    (cli, runs)
}

#[test]
fn calls_with_cargo_are_runs() {
    let call = "cargo run --release --manifest-path lab/Cargo.toml -- ";
    let calls = BOOK.lines().filter_map(|line| line.strip_prefix(call));
    let counts = calls.map(|call| {
        let options = call.split('#').next().unwrap_or_default();
        let (_, runs) = runs(call, options);
        (runs[0].task, runs.len())
    });
    let counts: Vec<(Task, usize)> = counts.collect();
    // Every arm on three seeds, and three arms on one.
    let all = 3 * Arm::value_variants().len();
    let expected = [(Task::Recall, all), (Task::Needles, 3), (Task::Text, 3)];
    assert_eq!(counts, expected);
}

#[test]
fn calls_on_a_gpu_are_runs() {
    let text = BOOK.replace("\\\n", " ");
    let calls = text.lines().filter_map(|line| line.strip_prefix("lab "));
    let calls: Vec<(Cli, Vec<Settings>)> = calls.map(|call| runs(call, call)).collect();
    let counts = calls.iter().map(|(_, runs)| (runs[0].task, runs.len()));
    let expected = [
        (Task::Text, 2 * 7),
        (Task::Needles, 2 * 3),
        // Dense attention once, ours with each window.
        (Task::Recall, (1 + 3) * 3),
    ];
    assert_eq!(counts.collect::<Vec<_>>(), expected);
    // The table is of the default layer.
    for (_, runs) in &calls {
        for run in runs.iter().filter(|run| run.arm == Arm::Ours) {
            let layer = run.decoder().attention;
            assert_eq!(
                layer.selection,
                Selection::keep(run.window.unwrap_or_default())
            );
            assert_eq!(layer.learning, Some(ScoreLearning::new()));
            assert_eq!(layer.scores, Scores::Ranking);
        }
    }
}
