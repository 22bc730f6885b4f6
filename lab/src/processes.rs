//! Runs in processes of their own: each has its own device, as threads of one process share the queue of a GPU.
//!
//! The called program starts copies of itself with the same options and `--worker`. It alone knows which runs are
//! left, and it alone writes rows; so processes claim and lock nothing, and a run whose process dies has no row, as
//! if it was not begun. A copy gets one [`Order`] per line of its input and answers each with an [`Answer`], one line
//! of its output; its other lines are passed through. It ends with its input.

use crate::Result;
use crate::cli::Options;
use crate::settings::{Settings, Task};
use crate::text::corpus::Corpus;
use crate::train::{Outcome, Point, run};
use burn::tensor::Device;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

/// Prefix of an answer's line, which no line of progress has.
const ANSWER: &str = "answer: ";

/// A run to make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// Its number, the prefix of its lines of progress.
    pub number: usize,
    /// The run.
    pub run: Settings,
}

/// Result of an order: the outcome, and Burn's name of the device and the threads; or the error that ended the
/// process.
type Answer = Result<(Outcome, String), String>;

/// A process that makes runs.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts a copy of this program with its options.
    pub fn copy() -> Result<Self> {
        let program = std::env::current_exe().map_err(|e| format!("this program: {e}"))?;
        let mut command = Command::new(program);
        command.args(std::env::args_os().skip(1)).arg("--worker");
        Self::start(command)
    }

    fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("a process: {e}"))?;
        let lines = BufReader::new(child.stdout.take().expect("it is piped"));
        Ok(Self { child, lines })
    }

    /// Outcome of a run and the machine's name. `pass` gets the lines that the process prints until then.
    pub fn run(&mut self, order: &Order, pass: impl Fn(&str)) -> Result<(Outcome, String)> {
        let line = serde_json::to_string(order).expect("an order's keys are strings");
        let input = self.child.stdin.as_mut().expect("it is piped");
        // A process that has already ended may have said why.
        let _ = writeln!(input, "{line}");
        let failed = |e| format!("a process: {e}");
        let mut line = Vec::new();
        loop {
            line.clear();
            if (self.lines.read_until(b'\n', &mut line)).map_err(failed)? == 0 {
                let status = self.child.wait().map_err(failed)?;
                return Err(format!("the process of run {} ended: {status}", order.number).into());
            }
            let line = String::from_utf8_lossy(&line);
            let Some(answer) = line.strip_prefix(ANSWER) else {
                pass(line.trim_end());
                continue;
            };
            let answer: Result<Answer, _> = serde_json::from_str(answer);
            return Ok(answer.map_err(|e| format!("the answer of a process: {e}"))??);
        }
    }
}

/// Closing its input ends the process.
impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Makes the runs of a task that the input orders, until one fails. Opens the device, and reads a corpus, when there
/// is a run to make. `show` gets every point of a curve.
pub fn serve(task: Task, options: &Options, show: impl Fn(usize, &Point)) -> Result<()> {
    let mut means = None;
    for line in std::io::stdin().lines() {
        let line = line.map_err(|e| format!("an order: {e}"))?;
        let order: Order = serde_json::from_str(&line).map_err(|e| format!("an order: {e}"))?;
        let answer = answer(task, options, &mut means, &order, &show);
        let answer: Answer = answer.map_err(|why| why.to_string());
        let line = serde_json::to_string(&answer).expect("an answer's keys are strings");
        println!("{ANSWER}{line}");
        if answer.is_err() {
            break;
        }
    }
    Ok(())
}

/// Corpus of the task, if it has one.
pub fn corpus(task: Task, options: &Options) -> Result<Option<Corpus>> {
    match task {
        Task::Recall => Ok(None),
        Task::Text | Task::Needles => Corpus::read(&options.data).map(Some),
    }
}

fn answer(
    task: Task,
    options: &Options,
    means: &mut Option<(Device, Option<Corpus>)>,
    order: &Order,
    show: impl Fn(usize, &Point),
) -> Result<(Outcome, String)> {
    let (device, corpus) = match means {
        Some(means) => means,
        None => {
            let device = options.device.open(options.dtype(task))?;
            means.insert((device, corpus(task, options)?))
        }
    };
    let (folder, number) = (options.checkpoints.as_deref(), order.number);
    let see = |point: &Point| show(number, point);
    let outcome = run(&order.run, corpus.as_ref(), device, folder, see);
    let outcome = outcome.map_err(|error| format!("run {number}: {error}"))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let machine = format!("{device:?}, {threads} threads");
    Ok((outcome, machine))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::arm::Arm;
    use crate::settings::Size;
    use std::cell::RefCell;

    /// Result of a shell script in place of the program, and the lines passed through.
    fn script(script: &str) -> (String, Vec<String>) {
        let order = Order {
            number: 7,
            run: Settings::of(Task::Recall, Arm::Ours, Size::Smallest),
        };
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut worker = Worker::start(command).expect("a shell");
        let lines = RefCell::new(Vec::new());
        let end = worker.run(&order, |line| lines.borrow_mut().push(line.to_owned()));
        let error = end.expect_err("it makes no run");
        (error.to_string(), lines.into_inner())
    }

    #[test]
    fn a_process_that_dies_is_an_error_and_what_it_said_is_passed_through() {
        let (error, lines) = script("read order; echo \"$order\" | cut -c 1-11; echo two; exit 3");
        assert_eq!(lines, ["{\"number\":7", "two"]);
        assert!(error.starts_with("the process of run 7 ended: "), "{error}");
        assert!(error.ends_with('3'), "{error}");
        let (error, _) = script("kill -9 $$");
        assert!(error.contains("signal"));
    }

    #[test]
    fn a_run_that_fails_says_why() {
        let (error, lines) = script("read order; echo 'answer: {\"Err\":\"run 7: no device\"}'");
        assert_eq!(error, "run 7: no device");
        assert!(lines.is_empty(), "{lines:?}");
        let (error, _) = script("echo 'answer: {}'");
        assert!(error.starts_with("the answer of a process: "));
    }
}
