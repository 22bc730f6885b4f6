//! Reads the output of test programs while passing it through to the terminal, each result with its time.

use super::times::{Ended, slowest};
use crate::process::{Result, shown};
use std::fmt::{self, Display, Formatter};
use std::io::{BufRead, BufReader, IsTerminal, PipeReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SLOWEST: usize = 20;

/// Runs `cargo test` with its output on the terminal. The error names each test that failed, and each crate with warnings.
pub fn run(command: &mut Command) -> Result {
    run_counted(command).map(drop)
}

/// [`run`], returning the number of tests that ran.
pub fn run_counted(command: &mut Command) -> Result<usize> {
    if std::io::stdout().is_terminal() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    run_to(command, std::io::stdout())
}

fn run_to(command: &mut Command, terminal: impl Write) -> Result<usize> {
    let mut summary = Summary::default();
    let start = Instant::now();
    let status = spawn(command)
        .and_then(|(mut child, output)| {
            let clock = || start.elapsed();
            pass_on(BufReader::new(output), terminal, clock, &mut summary)?;
            child.wait()
        })
        .map_err(|e| format!("cannot run {}: {e}", shown(command)))?;
    print!("\n{}", slowest(&summary.times, SLOWEST));
    let [built, run] = [summary.built, start.elapsed().saturating_sub(summary.built)];
    println!(
        "\n{} in {:.0} s, built in {:.0} s",
        summary.totals(),
        run.as_secs_f64(),
        built.as_secs_f64()
    );
    if status.success() && summary.warnings.is_empty() {
        Ok(summary.passed)
    } else {
        Err(format!("{} failed: {status}{summary}", shown(command)))
    }
}

/// Starts a command with one pipe for both its streams, so that cargo's messages about a program stay before and
/// after the program's output.
fn spawn(command: &mut Command) -> std::io::Result<(Child, PipeReader)> {
    let (reader, writer) = std::io::pipe()?;
    let child = command.stdout(writer.try_clone()?).stderr(writer).spawn()?;
    // The command would keep its ends of the pipe open.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Ok((child, reader))
}

/// Copies line by line, adding to test results the time since their program started, and reads each line.
fn pass_on(
    mut from: impl BufRead,
    mut to: impl Write,
    mut clock: impl FnMut() -> Duration,
    summary: &mut Summary,
) -> std::io::Result<()> {
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line)? > 0 {
        let stamp = summary.read(&without_colors(&String::from_utf8_lossy(&line)), clock());
        if let Some(stamp) = stamp {
            write!(to, "{:7.1} s  ", stamp.as_secs_f64())?;
        }
        to.write_all(&line)?;
        to.flush()?;
        line.clear();
    }
    Ok(())
}

/// The results of the programs so far.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Summary {
    passed: usize,
    failed: usize,
    ignored: usize,
    programs: usize,
    failures: Vec<Failure>,
    warnings: Vec<String>,
    built: Duration,
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
    /// Reads the next line, without colours, at time `now`; returns the time since the program started if the line is
    /// a test's result.
    fn read(&mut self, line: &str, now: Duration) -> Option<Duration> {
        let line = line.trim_end();
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
        } else if line.starts_with("warning: `") && line.contains(" generated ") {
            self.warnings.push(line.to_owned());
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
            let current = std::mem::take(&mut self.current);
            self.failures.push(Failure {
                program: current.program,
                tests: current.result.unwrap_or_default(),
                rerun,
            });
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

    fn totals(&self) -> String {
        let (passed, failed, ignored) = (self.passed, self.failed, self.ignored);
        let programs = self.programs;
        format!("{programs} test programs: {passed} passed, {failed} failed, {ignored} ignored")
    }
}

impl Display for Summary {
    /// One line per crate with warnings and per failed test, below its program.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for warning in &self.warnings {
            write!(f, "\n{warning}")?;
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
        let mut shown = Vec::new();
        let clock = || Duration::ZERO;
        pass_on(output.as_bytes(), &mut shown, clock, &mut summary).unwrap();
        let shown = String::from_utf8(shown).unwrap();
        assert_eq!(shown.replace("    0.0 s  ", ""), output);
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
            "4 test programs: 3 passed, 4 failed, 1 ignored"
        );
    }

    #[test]
    fn programs_that_pass_are_counted_alone() {
        let summary = read(&[PASSED, PASSED].concat());
        assert_eq!(summary.to_string(), "");
        assert_eq!(
            summary.totals(),
            "2 test programs: 4 passed, 0 failed, 0 ignored"
        );
    }

    #[test]
    fn results_have_the_time_since_their_program_started() {
        let mut seconds = 0;
        let clock = || {
            seconds += 1;
            Duration::from_secs(seconds)
        };
        let mut shown = Vec::new();
        let mut summary = Summary::default();
        pass_on(PASSED.as_bytes(), &mut shown, clock, &mut summary).unwrap();
        let shown = String::from_utf8(shown).unwrap();
        let results: Vec<&str> = shown.lines().filter(|line| line.contains("...")).collect();
        let expected = ["    1.0 s  test a ... ok", "    2.0 s  test b ... ok"];
        assert_eq!(results, expected);
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

    #[test]
    fn a_program_runs_to_its_end_and_says_what_failed() {
        let mut shell = Command::new("sh");
        let script = "printf '%s\\n' '     Running tests/a.rs (deps/a-1)' >&2; echo failures:; echo '    x::y'; echo; \
                      echo 'test result: FAILED. 0 passed; 1 failed; 0 ignored'; \
                      echo 'error: test failed, to rerun pass `--test a`' >&2; exit 3";
        let mut terminal = Vec::new();
        let error = run_to(shell.args(["-c", script]), &mut terminal).unwrap_err();
        let end = "failed: exit status: 3\na, tests/a.rs (cargo test --test a)\n    x::y";
        assert!(error.ends_with(end), "{error}");
        let terminal = String::from_utf8(terminal).unwrap();
        assert!(terminal.starts_with("     Running tests/a.rs (deps/a-1)\nfailures:\n"));
        assert!(terminal.ends_with("to rerun pass `--test a`\n"));

        let said = |script: &str| run_to(Command::new("sh").args(["-c", script]), Vec::new());
        assert_eq!(said("echo fine"), Ok(0));
        let warned = said("echo 'warning: `a` (lib) generated 1 warning'").unwrap_err();
        assert!(
            warned.ends_with("\nwarning: `a` (lib) generated 1 warning"),
            "{warned}"
        );
    }
}
