//! The results of test programs, read from the lines that they print.

use super::times::{Ended, slowest};
use crate::process::Result;
use std::fmt::{self, Display, Formatter};
use std::time::Duration;

const SLOWEST: usize = 20;

/// The results of the programs so far.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Commands that failed, and how.
    commands: Vec<String>,
    passed: usize,
    failed: usize,
    ignored: usize,
    programs: usize,
    failures: Vec<Failure>,
    warnings: Vec<String>,
    /// Time at which cargo had built the programs.
    pub built: Duration,
    /// Time and name of every test, with its program's name.
    times: Vec<(Duration, String)>,
    current: Current,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Failure {
    program: String,
    /// Tests reported as failed; empty if the program ended before reporting them.
    tests: Vec<String>,
    /// Options that run it alone, e.g. `-p flash-dma-cpu --lib`.
    rerun: String,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Current {
    program: String,
    start: Duration,
    ended: Vec<Ended>,
    /// Names below the last `failures:`, as long as nothing else follows.
    list: Option<Vec<String>>,
    /// Names of failed tests once the program has reported; `None` before.
    result: Option<Vec<String>>,
}

impl Summary {
    /// Of one program, whose name is known, before its first line.
    pub fn of(program: &str) -> Self {
        Self {
            programs: 1,
            current: Current {
                program: program.to_owned(),
                ..Current::default()
            },
            ..Self::default()
        }
    }

    /// Reads the next line at time `now`; returns the time since the program started if the line is
    /// a test's result.
    pub fn read(&mut self, line: &str, now: Duration) -> Option<Duration> {
        let line = without_colors(line);
        let line = line.trim_end();
        self.warn(line);
        if let Some(name) = test(line) {
            let time = now.saturating_sub(self.current.start);
            self.current.ended.push(Ended { name, time });
            return Some(time);
        }
        if let Some(program) = program(line) {
            self.programs += 1;
            self.current = Current {
                program,
                ..Current::default()
            };
        } else if line.trim_start().starts_with("Finished ") {
            self.built = now;
        } else if line.starts_with("running ") {
            self.current.start = now;
        } else if let Some(rest) = line.strip_prefix("test result: ") {
            self.count(rest);
            self.take_times();
            // Documentation tests have more than one result.
            let failed = self.current.list.take().unwrap_or_default();
            self.current.result.get_or_insert_default().extend(failed);
        } else if let Some(rerun) = rerun(line) {
            self.fail(&rerun);
        } else if line == "failures:" {
            // There are two: the first precedes the tests' output, the last their names.
            self.current.list = Some(Vec::new());
        } else if let Some(list) = &mut self.current.list {
            match line.strip_prefix("    ") {
                Some(name) => list.push(name.to_owned()),
                None if line.is_empty() => {}
                None => self.current.list = None,
            }
        }
        None
    }

    /// Notes the crate of a line that counts its warnings.
    pub fn warn(&mut self, line: &str) {
        if line.starts_with("warning: `") && line.contains(" generated ") {
            self.warnings.push(line.to_owned());
        }
    }

    /// Notes a command that failed, and how.
    pub fn fail_command(&mut self, failed: String) {
        self.commands.push(failed);
    }

    /// Notes that the current program has failed.
    pub fn fail(&mut self, rerun: &str) {
        let current = std::mem::take(&mut self.current);
        self.failures.push(Failure {
            program: current.program,
            tests: current.result.unwrap_or_default(),
            rerun: rerun.to_owned(),
        });
    }

    /// Adds the results of other programs.
    pub fn add(&mut self, other: Self) {
        self.commands.extend(other.commands);
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.programs += other.programs;
        self.failures.extend(other.failures);
        self.warnings.extend(other.warnings);
        self.times.extend(other.times);
    }

    /// Prints the slowest tests and the totals; returns the number of tests that passed. The error names each test that
    /// failed, and each crate with warnings.
    pub fn report(&self, built: Duration, total: Duration) -> Result<usize> {
        print!("\n{}", slowest(&self.times, SLOWEST));
        let [built, ran] = [built, total.saturating_sub(built)].map(|time| time.as_secs_f64());
        println!("\n{} in {ran:.0} s, built in {built:.0} s", self.totals());
        match self.commands.is_empty() && self.failures.is_empty() && self.warnings.is_empty() {
            true => Ok(self.passed),
            false => Err(format!("tests failed{self}")),
        }
    }

    fn take_times(&mut self) {
        let ended = std::mem::take(&mut self.current.ended);
        let named = |(time, name)| (time, format!("{}: {name}", self.current.program));
        let times = super::times::of(&ended, super::times::threads());
        self.times.extend(times.map(named));
    }

    fn count(&mut self, result: &str) {
        let (_, counts) = result.split_once(". ").unwrap_or_default();
        for count in counts.split("; ") {
            let Some((number, kind)) = count.split_once(' ') else {
                continue;
            };
            let number: usize = number.parse().unwrap_or(0);
            match kind {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }

    pub fn totals(&self) -> String {
        let (passed, failed, ignored) = (self.passed, self.failed, self.ignored);
        let programs = self.programs;
        format!("{programs} test processes: {passed} passed, {failed} failed, {ignored} ignored")
    }
}

impl Display for Summary {
    /// One line per command that failed, per crate with warnings and per failed test, below its program.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for line in self.commands.iter().chain(&self.warnings) {
            write!(f, "\n{line}")?;
        }
        for failure in &self.failures {
            let (program, rerun) = (&failure.program, &failure.rerun);
            write!(f, "\n{program} (cargo test {rerun})")?;
            if failure.tests.is_empty() {
                write!(f, "\n    ended before it gave a result")?;
            }
            for test in &failure.tests {
                write!(f, "\n    {test}")?;
            }
        }
        Ok(())
    }
}

fn test(line: &str) -> Option<String> {
    let (name, _result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let name = name.strip_suffix(" - should panic").unwrap_or(name);
    Some(name.to_owned())
}

fn program(line: &str) -> Option<String> {
    let line = line.trim_start();
    if let Some(name) = line.strip_prefix("Doc-tests ") {
        return Some(format!("doc tests of {name}"));
    }
    let running = line.strip_prefix("Running ")?.strip_suffix(')')?;
    let (source, path) = running.split_once(" (")?;
    let file = path.rsplit(['/', '\\']).next()?;
    let name = file.rsplit_once('-').map_or(file, |(name, _hash)| name);
    Some(match source.strip_prefix("unittests ") {
        Some(source) => format!("unit tests of {name}, {source}"),
        None => format!("{name}, {source}"),
    })
}

/// Options that cargo prints to rerun the program that just failed.
fn rerun(line: &str) -> Option<String> {
    let rest = line
        .strip_prefix("error: test failed, to rerun pass `")
        .or_else(|| line.strip_prefix("error: doctest failed, to rerun pass `"))?;
    Some(rest.strip_suffix('`')?.to_owned())
}

fn without_colors(line: &str) -> String {
    let mut parts = line.split("\u{1b}[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        let colored = part.split_once('m').map_or(part, |(_codes, rest)| rest);
        text + colored
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(output: &str) -> Summary {
        let mut summary = Summary::default();
        for line in output.lines() {
            summary.read(line, Duration::ZERO);
        }
        summary
    }

    const FAILED: &str = "\
   Compiling one v0.1.0 (/one)
warning: unneeded `return` statement
warning: `one` (lib test) generated 1 warning (run `cargo clippy --fix` to apply 1 suggestion)
    Finished `test` profile [unoptimized] target(s) in 1.50s
     Running unittests src/lib.rs (/target/debug/deps/one_crate-0123456789abcdef)

running 4 tests
test fine ... ok
test left ... ignored
test deep::wrong ... skipped: bf16 on kernels_wgpu
FAILED
test worse ... FAILED

failures:

---- deep::wrong stdout ----
failures:
    not a test
but what one printed

---- worse stdout ----
    nor this

failures:
    deep::wrong
    worse

test result: FAILED. 1 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s

error: test failed, to rerun pass `-p one --lib`
";

    const PASSED: &str = "\
     Running tests/main.rs (target/debug/deps/main-0123456789abcdef)

running 2 tests
test a ... ok
test b ... ok

test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.01s

";

    const DIED: &str = "\
     Running tests/suite/main.rs (target/debug/deps/suite-0123456789abcdef)

running 2 tests
test a ... ok
error: test failed, to rerun pass `-p two --test suite`

Caused by:
  process didn't exit successfully: `/target/debug/deps/suite-0123456789abcdef` (signal: 6, SIGABRT)
";

    const DOCUMENTATION: &str = "\
   Doc-tests one

running 1 test
test src/lib.rs - apart (line 9) ... FAILED

failures:

failures:
    src/lib.rs - apart (line 9)

test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s


running 1 test
test src/lib.rs - call (line 3) ... FAILED

failures:

---- src/lib.rs - call (line 3) stdout ----
error: expected `;`

failures:
    src/lib.rs - call (line 3)

test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s

error: doctest failed, to rerun pass `-p one --doc`
error: 3 targets failed:
    `-p one --lib`
    `-p two --test suite`
    `-p one --doc`
";

    #[test]
    fn every_failed_test_of_every_program_is_named() {
        let summary = read(&[FAILED, PASSED, DIED, DOCUMENTATION].concat());
        let expected = "
warning: `one` (lib test) generated 1 warning (run `cargo clippy --fix` to apply 1 suggestion)
unit tests of one_crate, src/lib.rs (cargo test -p one --lib)
    deep::wrong
    worse
suite, tests/suite/main.rs (cargo test -p two --test suite)
    ended before it gave a result
doc tests of one (cargo test -p one --doc)
    src/lib.rs - apart (line 9)
    src/lib.rs - call (line 3)";
        assert_eq!(summary.to_string(), expected);
        assert_eq!(
            summary.totals(),
            "4 test processes: 3 passed, 4 failed, 1 ignored"
        );
    }

    #[test]
    fn programs_that_pass_are_counted_alone() {
        let summary = read(&[PASSED, PASSED].concat());
        assert_eq!(summary.to_string(), "");
        assert_eq!(
            summary.totals(),
            "2 test processes: 4 passed, 0 failed, 0 ignored"
        );
    }

    #[test]
    fn colors_make_no_difference() {
        let plain = read(FAILED);
        let colored = FAILED
            .replace("     Running", "\u{1b}[1m\u{1b}[92m     Running\u{1b}[0m")
            .replace("error: ", "\u{1b}[1m\u{1b}[91merror\u{1b}[0m: ")
            .replace("FAILED", "\u{1b}[31mFAILED\u{1b}[0m");
        assert_eq!(read(&colored), plain);
    }
}
