//! Many problems, on many threads.

use super::draw::Palette;
use super::options::Choice;
use super::record::{Failure, Record};
use super::run::{Fuzzed, Outcome, run};
use super::shrink::shrink;
use super::spec::Spec;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The problems of one process of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Index of the process, from 0.
    pub process: usize,
    /// The number of processes.
    pub processes: usize,
}

impl Share {
    /// All problems.
    pub const ALL: Self = Self {
        process: 0,
        processes: 1,
    };
}

/// The longest time for shrinking a failure.
const SHRINKING: Duration = Duration::from_secs(60);

/// The number of problems, and the way they run.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most problems, of all processes together.
    pub problems: u64,
    /// The share of these that runs here.
    pub share: Share,
    /// The longest time.
    pub time: Duration,
    /// Failures that end the run.
    pub failures: usize,
    /// The option that a problem must have to run; `None` runs all.
    pub only: Option<Choice>,
    /// Threads.
    pub threads: usize,
    /// Seconds between two lines of progress; 0 for none.
    pub progress: u64,
}

impl Limits {
    /// Limits of this many problems, on two threads and to the first failure.
    pub fn of(problems: u64) -> Self {
        Self {
            problems,
            share: Share::ALL,
            time: Duration::from_secs(3600),
            failures: 1,
            only: None,
            threads: 2,
            progress: 0,
        }
    }
}

/// Draws problems and runs them, until the first of the limits.
pub fn fuzz<E: Fuzzed>(engine: &E, palette: &Palette, limits: &Limits) -> (Record, Vec<Failure>) {
    let start = Instant::now();
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let failures: Mutex<Vec<Failure>> = Mutex::default();
    let lock = || {
        failures
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    };
    let worker = |thread: usize| {
        let mut record = Record::default();
        let mut said = start;
        while !stop.load(Ordering::Relaxed) && start.elapsed() < limits.time {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= limits.problems {
                break;
            }
            let Share { process, processes } = limits.share;
            if palette.process_of(number, processes) != process {
                continue;
            }
            let spec = palette.draw(number);
            if limits.only.is_some_and(|option| !(option.is_in)(&spec)) {
                continue;
            }
            let outcome = run(engine, &spec);
            record.add(&spec, &outcome);
            if let Outcome::Failed(what) = outcome {
                let mut failures = lock();
                failures.push(Failure { spec, what });
                if failures.len() >= limits.failures {
                    stop.store(true, Ordering::Relaxed);
                }
            }
            let wait = Duration::from_secs(limits.progress);
            if thread == 0 && limits.progress > 0 && said.elapsed() >= wait {
                said = Instant::now();
                let (seconds, failed) = (start.elapsed().as_secs(), lock().len());
                eprintln!("{} problems, {failed} wrong, {seconds} s", number + 1);
            }
        }
        record
    };
    let record = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..limits.threads.max(1))
            .map(|thread| scope.spawn(move || worker(thread)))
            .collect();
        let mut record = Record::default();
        for thread in threads {
            // A panic in a problem is caught there.
            record.join(thread.join().expect("a thread of the fuzzer"));
        }
        record
    });
    (
        record,
        failures
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner()),
    )
}

/// The smallest problem that fails in the same way, and its fault; `None` if that one passes when it is run again.
pub fn shrunk<E: Fuzzed>(engine: &E, spec: &Spec) -> Option<Failure> {
    let failure = |spec: &Spec| match run(engine, spec) {
        Outcome::Failed(what) => Some(what),
        Outcome::Passed(_) | Outcome::Skipped(_) => None,
    };
    failure(spec)?;
    let spec = shrink(spec, SHRINKING, |spec| failure(spec).is_some());
    let what = failure(&spec)?;
    Some(Failure { spec, what })
}

/// Runs the problem of a line of text: for regression tests.
///
/// # Panics
///
/// If the line is not a problem, or with the fault.
pub fn assert_line<E: Fuzzed>(engine: &E, line: &str) {
    let spec: Spec = line
        .parse()
        .unwrap_or_else(|error| panic!("{line}: {error}"));
    match run(engine, &spec) {
        Outcome::Failed(what) => panic!("{} at {spec}:\n{what}", E::NAME),
        Outcome::Skipped(why) => crate::engine::skip::<E>(&format!("{spec}: {why}")),
        Outcome::Passed(_) => {}
    }
}

/// A regression test of a failure.
pub fn regression_test(spec: &Spec) -> String {
    let text = spec.to_string();
    format!(
        "raw_engines!(NAME_WHAT_WENT_WRONG);\n\n\
         fn NAME_WHAT_WENT_WRONG<E: Fuzzed>(engine: &E) {{\n    \
         fuzz::assert_line(engine, \"{text}\");\n}}"
    )
}
