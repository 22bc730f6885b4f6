//! Runs in processes of their own: each has its own device, and threads of one process share what hands work to a GPU.
//!
//! The program that was called starts copies of itself with the same options and `--worker`. It alone knows which runs are
//! left, and it alone writes rows; so nothing is claimed or locked between processes, and a run whose process dies has no
//! row, as if it was not begun. A copy gets one [`Order`] per line of its input and answers each with an [`Answer`], one line
//! of its output; its other lines are passed through. It ends where its input does.

use crate::settings::Settings;
use crate::train::{Outcome, Point, train};
use burn::tensor::Device;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

/// What begins the line of an answer, and no line of progress.
const ANSWER: &str = "answer: ";

/// A run to make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// Its number, which its lines of progress begin with.
    pub number: usize,
    /// The run.
    pub run: Settings,
}

/// What came of an order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// The run ended.
    Done {
        /// Its outcome.
        outcome: Box<Outcome>,
        /// Burn's name of the device, and the threads.
        machine: String,
    },
    /// It failed, and with it the process.
    Failed(String),
}

/// A process that makes runs.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts a copy of this program with its options.
    ///
    /// # Errors
    ///
    /// One line, if the system refuses.
    pub fn copy() -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|e| format!("this program: {e}"))?;
        let mut command = Command::new(program);
        command.args(std::env::args_os().skip(1)).arg("--worker");
        Self::start(command)
    }

    fn start(mut command: Command) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("a process: {e}"))?;
        let lines = BufReader::new(child.stdout.take().expect("it is piped"));
        Ok(Self { child, lines })
    }

    /// The outcome of a run and the machine's name. What the process prints until then goes through `pass`.
    ///
    /// # Errors
    ///
    /// One line: that of the run, or how the process ended.
    pub fn run(&mut self, order: &Order, pass: impl Fn(&str)) -> Result<(Outcome, String), String> {
        let line = serde_json::to_string(order).expect("an order's keys are strings");
        let input = self.child.stdin.as_mut().expect("it is piped");
        // A process that has ended before may have said why.
        let _ = writeln!(input, "{line}");
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = self.lines.read_until(b'\n', &mut line);
            if read.map_err(|e| format!("a process: {e}"))? == 0 {
                let status = self.child.wait();
                let status = status.map_err(|e| format!("a process: {e}"))?;
                return Err(format!(
                    "the process of run {} ended: {status}",
                    order.number
                ));
            }
            let line = String::from_utf8_lossy(&line);
            let Some(answer) = line.strip_prefix(ANSWER) else {
                pass(line.trim_end());
                continue;
            };
            let answer: Result<Answer, _> = serde_json::from_str(answer);
            return match answer.map_err(|e| format!("the answer of a process: {e}"))? {
                Answer::Done { outcome, machine } => Ok((*outcome, machine)),
                Answer::Failed(why) => Err(why),
            };
        }
    }
}

/// The process has nothing left to read, so it ends.
impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Makes the runs that the input orders, until one fails. `open` opens the device when there is one to make; `show` gets
/// every evaluation.
pub fn serve(
    open: impl Fn() -> Result<Device, String>,
    show: impl Fn(usize, &Point),
) -> Result<(), String> {
    let mut device = None;
    for line in std::io::stdin().lines() {
        let line = line.map_err(|e| format!("an order: {e}"))?;
        let order: Order = serde_json::from_str(&line).map_err(|e| format!("an order: {e}"))?;
        let answer = answer(&mut device, &open, &order, &show);
        let line = serde_json::to_string(&answer).expect("an answer's keys are strings");
        println!("{ANSWER}{line}");
        if let Answer::Failed(_) = answer {
            break;
        }
    }
    Ok(())
}

fn answer(
    device: &mut Option<Device>,
    open: impl Fn() -> Result<Device, String>,
    order: &Order,
    show: impl Fn(usize, &Point),
) -> Answer {
    let device = match device {
        Some(device) => device,
        None => match open() {
            Ok(opened) => device.insert(opened),
            Err(why) => return Answer::Failed(why),
        },
    };
    match train(&order.run, device, |point| show(order.number, point)) {
        Ok(outcome) => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            Answer::Done {
                outcome: Box::new(outcome),
                machine: format!("{device:?}, {threads} threads"),
            }
        }
        Err(error) => Answer::Failed(format!("run {}: {error}", order.number)),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::arm::Arm;
    use crate::settings::Size;
    use std::cell::RefCell;

    /// What a shell script in the place of the program leads to, and the lines that are passed through.
    fn script(script: &str) -> (Result<(Outcome, String), String>, Vec<String>) {
        let order = Order {
            number: 7,
            run: Settings::of(Arm::Ours, Size::Smallest),
        };
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut worker = Worker::start(command).expect("a shell");
        let lines = RefCell::new(Vec::new());
        let end = worker.run(&order, |line| lines.borrow_mut().push(line.to_owned()));
        (end, lines.into_inner())
    }

    #[test]
    fn a_process_that_dies_is_an_error_and_what_it_said_is_passed_through() {
        let (end, lines) = script("read order; echo \"$order\" | cut -c 1-11; echo two; exit 3");
        assert_eq!(lines, ["{\"number\":7", "two"]);
        let error = end.unwrap_err();
        assert!(error.starts_with("the process of run 7 ended: "), "{error}");
        assert!(error.ends_with('3'), "{error}");
        let (end, _) = script("kill -9 $$");
        assert!(end.unwrap_err().contains("signal"));
    }

    #[test]
    fn a_run_that_fails_says_why() {
        let (end, lines) = script("read order; echo 'answer: {\"Failed\":\"run 7: no device\"}'");
        assert_eq!(end.unwrap_err(), "run 7: no device");
        assert!(lines.is_empty(), "{lines:?}");
        let (end, _) = script("echo 'answer: {}'");
        assert!(end.unwrap_err().starts_with("the answer of a process: "));
    }
}
