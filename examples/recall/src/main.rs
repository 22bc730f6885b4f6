//! `recall`: see `recall --help`, `arm.rs` for what is compared, and `task.rs` for the task.

use clap::Parser;
use recall::cli::Cli;
use recall::estimate;
use recall::rows::{self, Row};
use recall::settings::Settings;
use recall::train::{Point, train};
use std::fs;
use std::panic::resume_unwind;
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use train_text::report;

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("recall: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: &Cli) -> Result<(), String> {
    let (start, time, runs) = (Instant::now(), cli.time()?, cli.runs()?);
    let rows = Mutex::new(rows::read(&cli.out)?);
    let others = match cli.times_from.as_ref().or(cli.rates_from.as_ref()) {
        Some(path) => rows::read(path)?,
        None => Vec::new(),
    };
    if cli.dry_run {
        list(cli, &runs, &lock(&rows), &others);
        return Ok(());
    }
    let device = (cli.device.open(cli.dtype)).map_err(|error| error.to_string())?;
    if let Some(folder) = cli.out.parent() {
        fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let commit = cli.commit.clone().or_else(report::commit);
    let commit = commit.unwrap_or_else(|| "unknown".into());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let machine = (cli.machine.clone()).unwrap_or_else(|| format!("{device:?}, {threads} threads"));
    let left = Mutex::new(runs.iter().enumerate());
    let not_begun = Mutex::new(0);
    let work = || -> Result<(), String> {
        loop {
            let Some((index, run)) = lock(&left).next() else {
                return Ok(());
            };
            let number = index + 1;
            println!("{number:3} of {}: {}", runs.len(), title(run));
            if lock(&rows).iter().any(|row| row.settings == *run) {
                println!("{number:3} {} has this row", cli.out.display());
                continue;
            }
            if let Some(time) = time {
                let expected = expected(&lock(&rows), &others, run).unwrap_or(0.0);
                if start.elapsed().as_secs_f64() + expected > time.as_secs_f64() {
                    println!("{number:3} may take {expected:.0} s, which are not left");
                    *lock(&not_begun) += 1;
                    continue;
                }
            }
            let outcome = train(run, &device, |point| show(number, point));
            let outcome = outcome.map_err(|error| error.to_string())?;
            println!(
                "{number:3} {:?} after {} steps and {:.0} s: {:.1} % answered, cap {:.1} %",
                outcome.stopped,
                outcome.steps_done,
                outcome.seconds,
                100.0 * outcome.last.accuracy,
                100.0 * run.cap(),
            );
            let mut rows = lock(&rows);
            rows.push(Row::new(run.clone(), outcome, &commit, &machine));
            rows::write(&cli.out, &rows)?;
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cli.at_once.get()).map(|_| scope.spawn(work)).collect();
        let mut ends = workers.into_iter().map(|worker| worker.join());
        ends.try_for_each(|end| end.unwrap_or_else(|panic| resume_unwind(panic)))
    })?;
    match *lock(&not_begun) {
        0 => {}
        count => println!("{count} runs were not begun: the same call goes on with them"),
    }
    Ok(())
}

/// The seconds that a run may take.
fn expected(rows: &[Row], others: &[Row], run: &Settings) -> Option<f64> {
    estimate::seconds(rows, run).or_else(|| estimate::seconds(others, run))
}

/// Prints the runs, and what they may take.
fn list(cli: &Cli, runs: &[Settings], rows: &[Row], others: &[Row]) {
    let (mut sum, mut unknown, mut left) = (0.0, 0, 0);
    for (index, run) in runs.iter().enumerate() {
        let (number, title) = (index + 1, title(run));
        if rows.iter().any(|row| row.settings == *run) {
            println!("{number:3} {title}: there");
            continue;
        }
        left += 1;
        match expected(rows, others, run) {
            Some(seconds) => {
                sum += seconds;
                println!("{number:3} {title}: {seconds:.0} s");
            }
            None => {
                unknown += 1;
                println!("{number:3} {title}");
            }
        }
    }
    let at_once = cli.at_once.get();
    println!(
        "{left} of {} runs are left: {sum:.0} s, with {at_once} at once {:.0} s if each takes as long then; {unknown} \
         of them have no rows to go by",
        runs.len(),
        sum / at_once as f64
    );
}

/// A run that panics ends the program, and its row was not begun.
fn lock<T>(of_all: &Mutex<T>) -> MutexGuard<'_, T> {
    of_all.lock().unwrap_or_else(PoisonError::into_inner)
}

fn title(run: &Settings) -> String {
    let (arm, task) = (run.arm.name(), run.task());
    format!(
        "{arm}, {} tokens, {} pairs, window {}, rate {}, seed {}",
        run.tokens, task.pairs, run.window, run.rate, run.seed
    )
}

fn show(number: usize, point: &Point) {
    println!(
        "{number:3} step {:5}  loss {:6.3}  answers {:5.1} %  facts kept {:5.1} %  gradient of scores {:.1e}",
        point.step,
        point.loss.unwrap_or(f64::NAN),
        100.0 * point.accuracy,
        100.0 * point.kept,
        point.score_gradient,
    );
}
