//! `recall`: see `recall --help`, `arm.rs` for what is compared, and `task.rs` for the task.

use clap::Parser;
use recall::cli::Cli;
use recall::estimate;
use recall::processes::{Order, Worker, serve};
use recall::rows::Row;
use recall::settings::Settings;
use recall::train::Point;
use std::fs;
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use train_text::{report, rows};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let end = match cli.worker {
        true => serve(
            || cli.device.open(cli.dtype).map_err(|e| e.to_string()),
            show,
        ),
        false => run(&cli),
    };
    match end {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            for line in error.lines() {
                eprintln!("recall: {line}");
            }
            ExitCode::from(2)
        }
    }
}

fn run(cli: &Cli) -> Result<(), String> {
    let (start, time, runs) = (Instant::now(), cli.time()?, cli.runs()?);
    let others = match cli.times_from.as_ref().or(cli.rates_from.as_ref()) {
        Some(path) => rows::read(path)?,
        None => Vec::new(),
    };
    if cli.dry_run {
        list(cli, &runs, &rows::read(&cli.out)?, &others);
        return Ok(());
    }
    if let Some(folder) = cli.out.parent() {
        fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let _held = rows::hold(&cli.out)?;
    let commit = cli.commit.clone().or_else(report::commit);
    let work = Work {
        cli,
        time: time.map(|time| (start, time)),
        runs: &runs,
        others,
        commit: commit.unwrap_or_else(|| "unknown".into()),
        left: Mutex::new(0..runs.len()),
        rows: Mutex::new(rows::read(&cli.out)?),
        not_begun: Mutex::new(0),
    };
    // One process that fails leaves the others their runs.
    let mut errors: Vec<String> = std::thread::scope(|scope| {
        let hands = 0..cli.processes.get();
        let hands: Vec<_> = hands.map(|_| scope.spawn(|| work.by_a_process())).collect();
        let ends = hands.into_iter().map(|hand| hand.join());
        ends.filter_map(|end| {
            end.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                .err()
        })
        .collect()
    });
    match *lock(&work.not_begun) {
        0 => {}
        count => println!("{count} runs were not begun: the same call goes on with them"),
    }
    errors.sort();
    errors.dedup();
    match errors.is_empty() {
        true => Ok(()),
        false => Err(errors.join("\n")),
    }
}

/// The runs of a call, from which every process gets the next one when it has made one.
struct Work<'a> {
    cli: &'a Cli,
    /// The start, and the time after which nothing is to run.
    time: Option<(Instant, Duration)>,
    runs: &'a [Settings],
    /// Rows that say how long a run takes.
    others: Vec<Row>,
    commit: String,
    left: Mutex<std::ops::Range<usize>>,
    rows: Mutex<Vec<Row>>,
    not_begun: Mutex<usize>,
}

impl Work<'_> {
    /// Has runs made by one process, until none is left.
    fn by_a_process(&self) -> Result<(), String> {
        let mut worker = None;
        loop {
            let Some(index) = lock(&self.left).next() else {
                return Ok(());
            };
            let (number, run) = (index + 1, &self.runs[index]);
            println!("{number:3} of {}: {}", self.runs.len(), title(run));
            if self.is_there(number, run) || self.is_too_long(number, run) {
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
            println!(
                "{number:3} {:?} after {} steps and {:.0} s: {:.1} % answered, cap {:.1} %",
                outcome.stopped,
                outcome.steps_done,
                outcome.seconds,
                100.0 * outcome.last.accuracy,
                100.0 * run.cap(),
            );
            let machine = self.cli.machine.as_ref().unwrap_or(&machine);
            let mut rows = lock(&self.rows);
            rows.push(Row::new(run.clone(), outcome, &self.commit, machine));
            rows::write(&self.cli.out, &rows)?;
        }
    }

    fn is_there(&self, number: usize, run: &Settings) -> bool {
        let there = lock(&self.rows).iter().any(|row| row.settings == *run);
        if there {
            println!("{number:3} {} has this row", self.cli.out.display());
        }
        there
    }

    /// Whether a run may end too late to be begun.
    fn is_too_long(&self, number: usize, run: &Settings) -> bool {
        let Some((start, time)) = self.time else {
            return false;
        };
        let expected = expected(&lock(&self.rows), &self.others, run).unwrap_or(0.0);
        let late = start.elapsed().as_secs_f64() + expected > time.as_secs_f64();
        if late {
            println!("{number:3} may take {expected:.0} s, which are not left");
            *lock(&self.not_begun) += 1;
        }
        late
    }
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
    let processes = cli.processes.get();
    println!(
        "{left} of {} runs are left: {sum:.0} s, with {processes} at once {:.0} s if each takes as long then; \
         {unknown} of them have no rows to go by",
        runs.len(),
        sum / processes as f64
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
        point.score_gradient.unwrap_or(f64::NAN),
    );
}
