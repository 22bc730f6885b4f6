//! The calls of the program that the book shows.

use clap::{Parser, ValueEnum};
use lab::arm::Arm;
use lab::cli::Cli;
use lab::settings::{Settings, Task};

const BOOK: &str = include_str!("../../../book/src/learning.md");

fn runs(line: &str, options: &str) -> (Cli, Vec<Settings>) {
    let cli = Cli::try_parse_from(["lab"].into_iter().chain(options.split_whitespace()));
    let cli = cli.unwrap_or_else(|error| panic!("{line}: {error}"));
    // The rates of an arm are in a file that the call before makes.
    let (task, options) = cli.options();
    let options = lab::cli::Options {
        rates_from: None,
        ..options.clone()
    };
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
    // Every arm on three seeds, then four arms on one, then two; three arms on one seed.
    let all = 3 * Arm::value_variants().len();
    let recall = [all, 4, 2].map(|count| (Task::Recall, count));
    assert_eq!(counts[..3], recall);
    assert_eq!(counts[3..], [(Task::Needles, 3), (Task::Text, 3)]);
}

#[test]
fn calls_on_a_gpu_are_runs() {
    let text = BOOK.replace("\\\n", " ");
    let calls = text.lines().filter_map(|line| line.strip_prefix("lab "));
    let calls: Vec<(Cli, Vec<Settings>)> = calls.map(|call| runs(call, call)).collect();
    let [sweep, table, turns, others @ ..] = &calls[..] else {
        panic!("a sweep, a table, turns and text: {calls:?}");
    };
    assert_eq!(sweep.1.len(), 4 * Arm::value_variants().len());
    let ((_, sweep), (_, table)) = (sweep.0.options(), table.0.options());
    assert_eq!(table.rates_from.as_ref(), Some(&sweep.out));
    assert_eq!(turns.1.len(), 5 * 4);
    let mut choices = turns.1.iter().map(|run| &run.choice);
    assert!(choices.all(|of| of.turns.is_some() && !of.lengthening.is_none()));
    assert!(!others.is_empty() && others.iter().all(|(_, runs)| runs[0].task != Task::Recall));
}
