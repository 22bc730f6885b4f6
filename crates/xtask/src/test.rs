//! `cargo xtask test`: everything that must hold before a change is merged.

use crate::process::{Result, cargo, run as run_command, switch};
use crate::{codegen, setup, tidy};
use std::time::{Duration, Instant};

type Step = (&'static str, fn() -> Result);

/// Every step selects the whole workspace with its default features, so that the dependencies are resolved
/// one way: clippy and the documentation share one set of their metadata, tests and code generation one
/// set of their libraries.
const STEPS: [Step; 7] = [
    ("setup", || setup::run(setup::Needs::ALL)),
    ("format", || {
        run_command(&mut cargo(["fmt", "--all", "--check"]))
    }),
    ("house rules", tidy::run),
    ("clippy", || {
        let args = [
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ];
        run_command(&mut cargo(args))
    }),
    ("tests", || run_command(&mut cargo(["test", "--workspace"]))),
    ("documentation", || {
        let mut doc = cargo(["doc", "--workspace", "--no-deps"]);
        run_command(doc.env("RUSTDOCFLAGS", "-D warnings"))
    }),
    ("generated code", || codegen::run(&[])),
];

/// What `--fast` runs: the first five.
const FAST: usize = 5;

/// Runs the steps, stopping at the first that fails, and prints what each took.
///
/// # Errors
/// The failed step's.
pub fn run(options: &[String]) -> Result {
    let fast = switch(options, "--fast")?;
    let steps = &STEPS[..if fast { FAST } else { STEPS.len() }];

    let mut times: Vec<(&str, Duration)> = Vec::new();
    let mut outcome = Ok(());
    for (name, step) in steps {
        println!("\n==> {name}");
        let start = Instant::now();
        outcome = step().map_err(|e| format!("step `{name}`: {e}"));
        times.push((name, start.elapsed()));
        if outcome.is_err() {
            break;
        }
    }

    println!("\n==> times");
    for (name, time) in &times {
        println!("{name:<16} {:7.1} s", time.as_secs_f64());
    }
    let total: Duration = times.iter().map(|(_, time)| *time).sum();
    println!("{:<16} {:7.1} s", "total", total.as_secs_f64());
    if outcome.is_ok() {
        println!("\nall {} steps passed", steps.len());
    }
    outcome
}
