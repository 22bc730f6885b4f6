//! The book's tutorial: a model that must learn which keys to keep.
//!
//! `cargo run --release -p tutorial` trains each arm of a table once and prints what it reaches;
//! `cargo run --release -p tutorial -- 3 4 5` does so for other seeds, and `--steps N` before them trains for so long.

use std::time::Instant;
use tutorial::model::Scores;
use tutorial::task::{FACTS, LENGTH};
use tutorial::training::{Arm, Rate, train};

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

fn main() {
    let (steps, seeds) = arguments(std::env::args().skip(1));
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
            let (_, outcome) = train(arm, seed, steps, |step, loss, now| {
                println!(
                    "step {step:4}  loss {loss:.3}  facts kept {:5.1} %  answers {:5.1} %",
                    100.0 * now.kept,
                    100.0 * now.right,
                );
            });
            table += &format!(
                "{:<24} {:>6} {:>10} {seed:>6} {:>10.1} % {:>7.1} % {:>8.1}\n",
                arm.name,
                arm.window,
                arm.runners_up,
                100.0 * outcome.kept,
                100.0 * outcome.right,
                start.elapsed().as_secs_f64(),
            );
        }
    }
    println!("\n{table}");
}

/// The number of steps, and the seeds.
///
/// # Panics
/// When an argument is neither `--steps` with a number nor a seed.
fn arguments(arguments: impl Iterator<Item = String>) -> (usize, Vec<u64>) {
    let mut arguments = arguments.peekable();
    let mut steps = STEPS;
    if arguments.next_if(|first| first == "--steps").is_some() {
        let number = arguments.next().and_then(|number| number.parse().ok());
        steps = number.expect("`--steps` is followed by a number");
    }
    let seeds: Vec<u64> = arguments
        .map(|seed| seed.parse().expect("the arguments are seeds"))
        .collect();
    if seeds.is_empty() {
        return (steps, vec![0]);
    }
    (steps, seeds)
}
