//! `lab`: see `lab --help`, `arm.rs` for the compared methods, and `recall/task.rs` and `text/needles.rs` for the
//! tasks.

use clap::Parser;
use lab::cli::{Cli, Options};
use lab::processes::{Order, Worker, corpus, serve};
use lab::rows::{self, Row};
use lab::settings::Settings;
use lab::text::answers::{Answered, FACTORS};
use lab::text::losses::{Losses, WindowLosses};
use lab::text::needles::Kind;
use lab::train::Point;
use std::fs;
use std::process::{Command, ExitCode};
use std::sync::{Mutex, MutexGuard, PoisonError};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let (task, options) = cli.options();
    let end = match options.worker {
        true => serve(task, options, show),
        false => run(&cli),
    };
    match end {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            for line in error.to_string().lines() {
                eprintln!("lab: {line}");
            }
            ExitCode::from(2)
        }
    }
}

fn run(cli: &Cli) -> lab::Result<()> {
    let (task, options) = cli.options();
    // Options are refused before a corpus is read.
    options.runs(task, "")?;
    let corpus = corpus(task, options)?;
    let fingerprint = corpus.map_or(String::new(), |corpus| corpus.fingerprint());
    let runs = options.runs(task, &fingerprint)?;
    let folder = options.out.parent().into_iter();
    for folder in folder.chain(options.checkpoints.as_deref()) {
        fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let _held = rows::hold(&options.out)?;
    let commit = options.commit.clone().or_else(commit);
    let work = Work {
        options,
        runs: &runs,
        commit: commit.unwrap_or_else(|| "unknown".into()),
        left: Mutex::new(0..runs.len()),
        rows: Mutex::new(rows::read(&options.out)?),
    };
    // If one process fails, the others make its remaining runs.
    let mut errors: Vec<String> = std::thread::scope(|scope| {
        let hands = (0..options.processes.get()).map(|_| scope.spawn(|| work.by_a_process()));
        let hands: Vec<_> = hands.collect();
        let ends = hands.into_iter().map(|hand| hand.join());
        let ends = ends.map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ends.filter_map(|end| Some(end.err()?.to_string()))
            .collect()
    });
    let rows = lock(&work.rows);
    for row in runs.iter().filter_map(|run| row_of(&rows, run)) {
        summarise(row);
    }
    errors.sort();
    errors.dedup();
    match errors.is_empty() {
        true => Ok(()),
        false => Err(errors.join("\n").into()),
    }
}

/// Runs of a call, from which every process takes the next one when it is idle.
struct Work<'a> {
    options: &'a Options,
    runs: &'a [Settings],
    commit: String,
    left: Mutex<std::ops::Range<usize>>,
    rows: Mutex<Vec<Row>>,
}

impl Work<'_> {
    /// Has runs made by one process until none is left.
    fn by_a_process(&self) -> lab::Result<()> {
        let mut worker = None;
        loop {
            let Some(index) = lock(&self.left).next() else {
                return Ok(());
            };
            let (number, run) = (index + 1, &self.runs[index]);
            println!("{number:3} of {}: {}", self.runs.len(), run.title());
            if row_of(&lock(&self.rows), run).is_some() {
                println!("{number:3} {} has this row", self.options.out.display());
                continue;
            }
            let worker = match &mut worker {
                Some(worker) => worker,
                None => worker.insert(Worker::copy()?),
            };
            let order = Order {
                number,
                run: run.clone(),
            };
            let (outcome, machine) = worker.run(&order, |line| println!("{line}"))?;
            let machine = self.options.machine.as_ref().unwrap_or(&machine);
            let mut rows = lock(&self.rows);
            rows.push(Row::new(run.clone(), outcome, &self.commit, machine));
            rows::write(&self.options.out, &rows)?;
        }
    }
}

fn row_of<'a>(rows: &'a [Row], run: &Settings) -> Option<&'a Row> {
    rows.iter().find(|row| row.settings == *run)
}

/// A run that panics ends the program, and its row was not begun.
fn lock<T>(of_all: &Mutex<T>) -> MutexGuard<'_, T> {
    of_all.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The commit of the working directory, with `-dirty` if it has changes; `None` outside a repository.
fn commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_string())
    };
    let commit = git(&["rev-parse", "HEAD"])?;
    let clean = git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(if clean { commit } else { commit + "-dirty" })
}

/// Prints a point of a curve.
fn show(number: usize, point: &Point) {
    let watched = &point.watched;
    let mut line = format!("{number:3} step {:5}", point.step);
    for (what, value) in [
        ("loss", point.training_loss),
        ("validation", watched.validation_loss),
        ("answers", watched.answer_loss),
    ] {
        if let Some(value) = value {
            line += &format!("  {what} {value:6.3}");
        }
    }
    for (what, share) in [("answers", watched.accuracy), ("facts kept", watched.kept)] {
        if let Some(share) = share {
            line += &format!("  {what} {:5.1} %", 100.0 * share);
        }
    }
    if let Some(norm) = point.score_gradient {
        line += &format!("  gradient of scores {norm:.1e}");
    }
    println!("{line}");
}

/// Prints a summary of a row.
fn summarise(row: &Row) {
    let (training, evaluation) = (&row.outcome.training, &row.outcome.evaluation);
    let step = training.step_milliseconds;
    let step = step.map_or(String::new(), |time| format!(", {time:.1} ms a step"));
    let (stopped, steps) = (training.stopped, training.steps_done);
    let title = row.settings.title();
    println!("{title}: {stopped:?} after {steps} steps{step}");
    if let (Some(accuracy), Some(places)) = (evaluation.accuracy, row.places) {
        let (answered, cap) = (100.0 * accuracy, 100.0 * places.cap);
        println!("    {answered:.1} % answered, cap {cap:.1} %");
    }
    for Losses { length, loss, .. } in &evaluation.losses {
        println!("    {length:6} bytes: loss {loss:.4}");
    }
    for WindowLosses { window, losses } in &evaluation.losses_by_window {
        println!("    with {window} keys: loss {:.4}", losses.loss);
    }
    let Some(answers) = &evaluation.answers else {
        return;
    };
    for (caches, factor) in answers.caches.iter().zip(FACTORS) {
        let length = caches.length;
        let right = |kind: Kind| {
            let of = |a: &&Answered| a.length == length && a.kind == kind;
            let shares = answers.answered.iter().filter(of).map(|a| a.right);
            let shares: Vec<f64> = shares.collect();
            100.0 * shares.iter().sum::<f64>() / shares.len() as f64
        };
        println!(
            "    {length:6} bytes ({factor} x): passkey {:5.1} %, needle {:5.1} %, caches {} bytes a text",
            right(Kind::Passkey),
            right(Kind::Needle),
            caches.bytes,
        );
    }
}
