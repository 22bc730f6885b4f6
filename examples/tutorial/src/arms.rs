//! The book's tutorial: a model that must learn which keys to keep.
//!
//! `cargo run --release -p tutorial -- arms` trains each arm of a table once and prints its results; arguments after
//! it are seeds, to train instead of seed 0. Before them, `--steps N` sets the number of steps, and after that
//! `--json FILE` writes a line of JSON for each run.
//! line of JSON for each run.

use crate::model::Scores;
use crate::task::{FACTS, LENGTH};
use crate::training::{Arm, Outcome, Rate, train};
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::time::Instant;

const STEPS: usize = 400;

fn arms() -> [Arm; 6] {
    let best = Arm::LEARNED;
    [
        Arm::DENSE,
        best,
        Arm {
            name: "the same, constant rate",
            rate: Rate::Constant,
            ..best
        },
        Arm {
            name: "linear",
            runners_up: 0,
            ..best
        },
        Arm {
            name: "zoh",
            scores: Scores::Zoh,
            runners_up: 0,
            ..best
        },
        Arm::RANDOM,
    ]
}

pub fn main(arguments: impl Iterator<Item = String>) -> Result<(), Box<dyn Error>> {
    let (steps, json, seeds) = read(arguments)?;
    // Opened before minutes of training, to report an unwritable file at once.
    let mut json = json.map(File::create).transpose()?;
    println!(
        "{LENGTH} tokens, {FACTS} facts; a question may be answered from the keys that are kept"
    );
    let mut table = format!(
        "{:<24} {:>6} {:>10} {:>6} {:>12} {:>9} {:>8}\n",
        "scores", "window", "runners-up", "seed", "facts kept", "answers", "seconds"
    );
    for arm in arms() {
        for &seed in &seeds {
            println!("\n{}, window {}, seed {seed}", arm.name, arm.window);
            let start = Instant::now();
            let outcome = train(arm, seed, steps, |step, loss, now| {
                println!(
                    "step {step:4}  loss {loss:.3}  facts kept {:5.1} %  answers {:5.1} %",
                    100.0 * now.kept,
                    100.0 * now.right,
                );
            });
            let seconds = start.elapsed().as_secs_f64();
            if let Some(json) = &mut json {
                let row = json_row(&arm, seed, steps, &outcome, seconds);
                writeln!(json, "{row}")?;
            }
            table += &format!(
                "{:<24} {:>6} {:>10} {seed:>6} {:>10.1} % {:>7.1} % {seconds:>8.1}\n",
                arm.name,
                arm.window,
                arm.runners_up,
                100.0 * outcome.kept,
                100.0 * outcome.right,
            );
        }
    }
    println!("\n{table}");
    Ok(())
}

/// A run as a row of `bench-results/learning/tutorial-cpu.json`. Names of arms need no escapes.
fn json_row(arm: &Arm, seed: u64, steps: usize, outcome: &Outcome, seconds: f64) -> String {
    format!(
        "{{\"arm\": \"{}\", \"window\": {}, \"runners_up\": {}, \"seed\": {seed}, \"steps\": {steps}, \
         \"kept\": {:.3}, \"right\": {:.3}, \"seconds\": {seconds:.1}}}",
        arm.name, arm.window, arm.runners_up, outcome.kept, outcome.right
    )
}

/// Reads `[--steps N] [--json FILE] [SEED ..]`.
fn read(
    arguments: impl Iterator<Item = String>,
) -> Result<(usize, Option<String>, Vec<u64>), &'static str> {
    let mut arguments = arguments.peekable();
    let (mut steps, mut json) = (STEPS, None);
    if arguments.next_if(|first| first == "--steps").is_some() {
        let number = arguments.next().and_then(|number| number.parse().ok());
        steps = number.ok_or("`--steps` is followed by a number")?;
    }
    if arguments.next_if(|next| next == "--json").is_some() {
        json = Some(arguments.next().ok_or("`--json` is followed by a file")?);
    }
    let seeds: Result<Vec<u64>, _> = arguments.map(|seed| seed.parse()).collect();
    let mut seeds = seeds.map_err(|_| "behind the options are seeds, which are numbers")?;
    if seeds.is_empty() {
        seeds.push(0);
    }
    Ok((steps, json, seeds))
}
