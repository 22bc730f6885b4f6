//! `cargo xtask test`: checks before a merge, in two commands.

mod documentation;
mod lanes;
mod programs;
mod summary;
mod times;

pub use documentation::stand_in as rustdoc;
pub use programs::run as run_programs;

use crate::process::{
    Result, cargo, linting, read_file, root, run as run_command, switch, target_dir,
};
use crate::{book, codegen, new_crate, release, setup, tidy, tools};
use std::collections::HashSet;
use std::process::Command;
use std::time::{Duration, Instant};

struct Step {
    name: &'static str,
    run: fn() -> Result,
    /// True if it builds CubeCL, which needs the step [`SETUP`].
    builds: bool,
}

impl Step {
    const fn new(name: &'static str, run: fn() -> Result) -> Self {
        Self {
            name,
            run,
            builds: false,
        }
    }

    const fn building(name: &'static str, run: fn() -> Result) -> Self {
        Self {
            builds: true,
            ..Self::new(name, run)
        }
    }
}

const SETUP: Step = Step::new("setup", setup::all);

/// Steps for every change. Each selects the whole workspace with its default features, so that dependencies are
/// resolved one way: tests and code generation share one set of libraries.
const STEPS: [Step; 9] = [
    SETUP,
    Step::new("format", format),
    Step::new("house rules", tidy::run),
    Step::new("spelling", || {
        run_command(&mut tools::TYPOS.command("typos")?)
    }),
    Step::new("reports", reports),
    Step::new("new crate", new_crate::check),
    Step::new("lints of programs", lint_programs),
    Step::building("lints and tests", tests_but_long),
    Step::building("generated code", || codegen::run(&[])),
];

const FULL_STEPS: [Step; 8] = [
    SETUP,
    Step::new("dependencies", dependencies),
    Step::building("documentation", documentation),
    Step::building("long tests", long_tests),
    Step::building("book", book::check),
    Step::new("release", release::check),
    Step::new("program of a new crate", new_crate::check_run),
    Step::building("lab", lab),
];

const LAB: [&str; 2] = ["--manifest-path", "lab/Cargo.toml"];

/// The `cargo test` of a workspace, with further options.
fn tests(workspace: &'static [&'static str]) -> impl Fn(&[&str]) -> Command + Sync {
    move |options| {
        let mut command = linting(["test", "--workspace", "--no-fail-fast"]);
        command.args(workspace).args(options);
        command.arg("--target-dir").arg(target_dir());
        command
    }
}

/// Both workspaces: the second one's own step comes half an hour later.
fn format() -> Result {
    run_command(&mut cargo(["fmt", "--all", "--check"]))?;
    run_command(cargo(["fmt", "--all", "--check"]).args(LAB))
}

fn tests_but_long() -> Result {
    let long = long_names()?;
    lanes::run(tests(&[]), |name| !long.contains(name), true).map(drop)
}

fn long_tests() -> Result {
    let long = long_names()?;
    let ran = lanes::run(tests(&[]), |name| long.contains(name), false)?;
    match long.len() {
        named if named == ran => Ok(()),
        named => Err(format!(
            "tests/long.txt names {named} tests, of which {ran} exist"
        )),
    }
}

fn long_names() -> Result<HashSet<String>> {
    Ok(names(&read_file(&root().join("tests/long.txt"))?))
}

fn names(text: &str) -> HashSet<String> {
    let lines = text.lines().map(str::trim);
    let names = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    names.map(str::to_owned).collect()
}

fn dependencies() -> Result {
    let mut deny = tools::DENY.command()?;
    // Without `advisories`: their database changes from day to day, and would fail unrelated changes.
    let args = ["check", "licenses", "bans", "sources"];
    run_command(deny.args(["--log-level", "error"]).args(args))
}

/// Options for the programs that no test needs, which build within seconds.
const PROGRAMS: [&str; 6] = [
    "--package",
    "flash-dma-tests",
    "--bins",
    "--no-default-features",
    "--features",
    "programs",
];

/// Lints [`PROGRAMS`].
fn lint_programs() -> Result {
    let mut clippy = cargo(["clippy"]);
    run_command(clippy.args(PROGRAMS).args(["--", "-D", "warnings"]))
}

/// Documents the libraries, [`PROGRAMS`] and this program. For those that go through Burn all of it would be checked again.
fn documentation() -> Result {
    documentation::build(&mut tests(&[])(&[]), target_dir().join("doc").into())?;
    let mut doc = cargo(["doc", "--no-deps", "--package", "xtask"]);
    run_command(doc.args(PROGRAMS).env("RUSTDOCFLAGS", "-D warnings"))
}

/// Checks that tables, plots and sentences of README and book agree with the rows.
fn reports() -> Result {
    run_command(Command::new("python3").args(["bench-results/report.py", "--check"]))
}

/// Checks the research workspace. Its libraries are built anew, with fewer features than the main one's.
fn lab() -> Result {
    lanes::run(tests(&LAB), |_| true, true).map(drop)
}

/// Runs all steps, or with `--full` the other ones, even after a failure, and prints the time of each. The error
/// names every step and every test that failed.
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
            // Printed now and at the end: the steps in between may take long.
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
    let (failed, all) = (failures.len(), steps.len());
    let failures = failures.join("\n\n");
    Err(format!("{failed} of {all} steps failed\n\n{failures}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_after_a_failure_run_and_every_failure_is_told() {
        let steps = [
            Step::new(SETUP.name, || Ok(())),
            Step::building("one", || Err("1 is wrong".into())),
            Step::building("two", || Ok(())),
            Step::building("three", || Err("3 is wrong".into())),
        ];
        let error = run_steps(&steps).unwrap_err();
        let expected = "2 of 4 steps failed\n\nstep `one`: 1 is wrong\n\nstep `three`: 3 is wrong";
        assert_eq!(error, expected);
        assert_eq!(run_steps(&steps[2..3]), Ok(()));
    }

    #[test]
    fn what_builds_is_not_run_without_its_libraries() {
        let steps = [
            Step::new(SETUP.name, || Err("no network".into())),
            Step::new("format", || Err("a line is too long".into())),
            Step::building("tests", || panic!("cannot be built")),
        ];
        let error = run_steps(&steps).unwrap_err();
        let expected = "3 of 3 steps failed\n\nstep `setup`: no network\n\nstep `format`: a line is too long\n\n\
                        step `tests`: not run without `setup`";
        assert_eq!(error, expected);
    }

    #[test]
    fn names_of_long_tests_are_read() {
        let names = names("# Why.\n\na::b\n  c\n");
        assert_eq!(names, ["a::b", "c"].map(str::to_owned).into());
    }
}
