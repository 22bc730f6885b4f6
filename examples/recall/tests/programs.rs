//! The calls of the program that the book shows.
#![cfg(feature = "flex")]

use clap::Parser;
use recall::arm::Arm;
use recall::cli::Cli;

#[test]
fn calls_in_the_book_are_runs() {
    let book = concat!(env!("CARGO_MANIFEST_DIR"), "/../../book/src/learning.md");
    let text = std::fs::read_to_string(book).expect("the chapter");
    // The example `language` checks its own.
    let calls = text
        .lines()
        .filter(|line| line.starts_with("cargo run ") && !line.contains(" -p language "));
    let runs = calls.map(|line| {
        let line = line.split('#').next().unwrap_or_default();
        let (program, options) = line.split_once(" -- ").expect("options");
        assert!(program.ends_with(" -p recall"), "{line}");
        let cli = Cli::try_parse_from(["recall"].into_iter().chain(options.split_whitespace()));
        let cli = cli.unwrap_or_else(|error| panic!("{line}: {error}"));
        cli.runs().unwrap_or_else(|error| panic!("{line}: {error}"))
    });
    let runs: Vec<usize> = runs.map(|runs| runs.len()).collect();
    // Every arm on three seeds, then four arms on one, then two.
    assert_eq!(runs, [3 * Arm::all().len(), 4, 2]);

    let text = text.replace("\\\n", " ");
    let calls = text.lines().filter(|line| line.starts_with("recall "));
    let calls: Vec<Cli> = calls
        .map(|line| Cli::try_parse_from(line.split_whitespace()).expect(line))
        .collect();
    let [sweep, table, factor, turns] = &calls[..] else {
        panic!("a sweep, a table, a factor and turns: {calls:?}");
    };
    assert_eq!(sweep.runs().expect(book).len(), 4 * Arm::all().len());
    assert_eq!(table.rates_from.as_ref(), Some(&sweep.out));
    let factor = factor.runs().expect(book);
    assert_eq!(factor.len(), 5);
    assert!((factor.iter()).all(|run| run.token_gradient_scale == Some(10.0)));
    let turns = turns.runs().expect(book);
    assert_eq!(turns.len(), 5 * 4);
    assert!((turns.iter()).all(|run| run.round_robin.is_some() && !run.lengthening.is_none()));
}
