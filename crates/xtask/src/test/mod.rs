//! `cargo xtask test`: what must hold before a change is merged, in two commands.

mod long;
mod programs;
mod times;

pub use programs::run as run_programs;

use crate::process::{Result, cargo, run as run_command, switch, target_dir};
use crate::{book, codegen, new_crate, release, setup, tidy, tools};
use std::process::Command;
use std::time::{Duration, Instant};

struct Step {
    name: &'static str,
    run: fn() -> Result,
    /// Whether it builds CubeCL, which needs the step [`SETUP`].
    builds: bool,
}

const SETUP: Step = Step {
    name: "setup",
    run: || setup::run(setup::Needs::ALL),
    builds: false,
};

/// What every change passes. Each step selects the whole workspace with its default features, so that the dependencies are
/// resolved one way: tests and code generation share one set of their libraries.
const STEPS: [Step; 9] = [
    SETUP,
    Step {
        name: "format",
        run: || run_command(&mut cargo(["fmt", "--all", "--check"])),
        builds: false,
    },
    Step {
        name: "house rules",
        run: tidy::run,
        builds: false,
    },
    Step {
        name: "spelling",
        run: || run_command(&mut tools::typos()?),
        builds: false,
    },
    Step {
        name: "reports",
        run: reports,
        builds: false,
    },
    Step {
        name: "new crate",
        run: new_crate::check,
        builds: false,
    },
    Step {
        name: "clippy",
        run: clippy,
        builds: true,
    },
    Step {
        name: "tests",
        run: || programs::run(long::without(&mut cargo(TESTS), &long::names()?)),
        builds: true,
    },
    Step {
        name: "generated code",
        run: || codegen::run(&[]),
        builds: true,
    },
];

/// What is left to `--full`.
const FULL_STEPS: [Step; 8] = [
    SETUP,
    Step {
        name: "dependencies",
        run: || {
            let mut deny = tools::DENY.command()?;
            // Not `advisories`: their database changes from day to day, and fails changes that are innocent of it.
            let args = [
                "--log-level",
                "error",
                "check",
                "licenses",
                "bans",
                "sources",
            ];
            run_command(deny.args(args))
        },
        builds: false,
    },
    Step {
        name: "documentation",
        run: || {
            let mut doc = cargo(["doc", "--workspace", "--no-deps"]);
            run_command(doc.env("RUSTDOCFLAGS", "-D warnings"))
        },
        builds: true,
    },
    Step {
        name: "long tests",
        run: long_tests,
        builds: true,
    },
    Step {
        name: "book",
        run: book::check,
        builds: true,
    },
    Step {
        name: "release",
        run: release::check,
        builds: false,
    },
    Step {
        name: "program of a new crate",
        run: new_crate::check_run,
        builds: false,
    },
    Step {
        name: "lab",
        run: lab,
        builds: true,
    },
];

const TESTS: [&str; 3] = ["test", "--workspace", "--no-fail-fast"];

fn long_tests() -> Result {
    let names = long::names()?;
    let ran = programs::run_counted(long::alone(&mut cargo(TESTS), &names))?;
    match ran == names.len() {
        true => Ok(()),
        false => Err(format!(
            "tests/long.txt names {} tests, of which {ran} exist",
            names.len()
        )),
    }
}

/// The lints of everything, programs that tests do not need included.
fn clippy() -> Result {
    let programs = ["--features", "flash-dma-tests/programs"];
    let mut clippy = cargo(["clippy", "--workspace", "--all-targets"]);
    run_command(clippy.args(programs).args(["--", "-D", "warnings"]))
}

/// The tables, plots and sentences of README and book are what the rows say.
fn reports() -> Result {
    run_command(Command::new("python3").args(["bench-results/report.py", "--check"]))
}

/// The workspace of research. Its libraries are built anew, with fewer features than the main one's, so it is tested but not
/// linted: its manifest denies the warnings.
fn lab() -> Result {
    let manifest = ["--manifest-path", "lab/Cargo.toml"];
    run_command(cargo(["fmt", "--all", "--check"]).args(manifest))?;
    let mut tests = cargo(TESTS);
    tests.args(manifest).arg("--target-dir").arg(target_dir());
    programs::run(&mut tests)
}

/// Runs all steps, or with `--full` those that it leaves out, even after a failure, and prints the time of each.
///
/// # Errors
/// The failures: every step, and every test by its name.
pub fn run(options: &[String]) -> Result {
    match switch(options, "--full")? {
        false => run_steps(&STEPS),
        true => run_steps(&FULL_STEPS),
    }
}

fn run_steps(steps: &[Step]) -> Result {
    let mut times: Vec<(&str, Duration)> = Vec::new();
    let mut failures: Vec<String> = Vec::new();
    let mut set_up = true;
    for step in steps {
        let name = step.name;
        if step.builds && !set_up {
            failures.push(format!("step `{name}`: not run without `{}`", SETUP.name));
            continue;
        }
        println!("\n==> {name}");
        let start = Instant::now();
        let outcome = (step.run)();
        times.push((name, start.elapsed()));
        if let Err(e) = outcome {
            // Printed now as well as at the end: the steps in between may take long.
            eprintln!("error: step `{name}`: {e}");
            failures.push(format!("step `{name}`: {e}"));
            set_up &= name != SETUP.name;
        }
    }

    println!("\n==> times");
    for (name, time) in &times {
        println!("{name:<16} {:7.1} s", time.as_secs_f64());
    }
    let total: Duration = times.iter().map(|(_, time)| *time).sum();
    println!("{:<16} {:7.1} s", "total", total.as_secs_f64());
    if failures.is_empty() {
        println!("\nall {} steps passed", steps.len());
        return Ok(());
    }
    Err(format!(
        "{} of {} steps failed\n\n{}",
        failures.len(),
        steps.len(),
        failures.join("\n\n")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(name: &'static str, builds: bool, run: fn() -> Result) -> Step {
        Step { name, run, builds }
    }

    #[test]
    fn steps_after_a_failure_run_and_every_failure_is_told() {
        let steps = [
            step(SETUP.name, false, || Ok(())),
            step("one", true, || Err("1 is wrong".into())),
            step("two", true, || Ok(())),
            step("three", true, || Err("3 is wrong".into())),
        ];
        let error = run_steps(&steps).unwrap_err();
        let expected = "2 of 4 steps failed\n\nstep `one`: 1 is wrong\n\nstep `three`: 3 is wrong";
        assert_eq!(error, expected);
        assert_eq!(run_steps(&steps[2..3]), Ok(()));
    }

    #[test]
    fn what_builds_is_not_run_without_its_libraries() {
        let steps = [
            step(SETUP.name, false, || Err("no network".into())),
            step("format", false, || Err("a line is too long".into())),
            step("clippy", true, || panic!("cannot be built")),
        ];
        let error = run_steps(&steps).unwrap_err();
        let expected = "3 of 3 steps failed\n\nstep `setup`: no network\n\nstep `format`: a line is too long\n\n\
                        step `clippy`: not run without `setup`";
        assert_eq!(error, expected);
    }
}
