//! Reads the output of test programs while passing it through to the terminal, each result with its time.

use super::summary::Summary;
use crate::process::{Result, shown};
use std::io::{BufRead, BufReader, IsTerminal, PipeReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Runs `cargo test` with its output on the terminal. The error names each test that failed, and each crate with warnings.
pub fn run(command: &mut Command) -> Result {
    let start = Instant::now();
    let summary = follow(command)?;
    let built = summary.built;
    summary.report(built, start.elapsed()).map(drop)
}

/// Runs `cargo test` with its output on the terminal, to its end.
pub fn follow(command: &mut Command) -> Result<Summary> {
    if std::io::stdout().is_terminal() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    follow_to(command, &mut std::io::stdout())
}

fn follow_to(command: &mut Command, terminal: &mut impl Write) -> Result<Summary> {
    let mut summary = Summary::default();
    let start = Instant::now();
    let status = spawn(command).and_then(|(mut child, output)| {
        let clock = || start.elapsed();
        pass_on(BufReader::new(output), terminal, clock, &mut summary)?;
        child.wait()
    });
    let status = status.map_err(|e| format!("cannot run {}: {e}", shown(command)))?;
    if !status.success() {
        summary.fail_command(format!("{} failed: {status}", shown(command)));
    }
    Ok(summary)
}

/// Runs a test program with the results of its tests on the terminal, and all that it prints if it fails.
pub fn follow_program(command: &mut Command, name: &str, rerun: &str) -> Result<Summary> {
    let mut printed = Vec::new();
    let mut summary = Summary::of(name);
    let start = Instant::now();
    let status = spawn(command).and_then(|(mut child, output)| {
        for line in BufReader::new(output).split(b'\n') {
            let line = line?;
            let text = String::from_utf8_lossy(&line);
            match summary.read(&text, start.elapsed()) {
                Some(stamp) => println!("{:7.1} s  {text}", stamp.as_secs_f64()),
                None => printed.extend(line.into_iter().chain([b'\n'])),
            }
        }
        child.wait()
    });
    let status = status.map_err(|e| format!("cannot run {}: {e}", shown(command)))?;
    if !status.success() {
        println!("{}", String::from_utf8_lossy(&printed));
        summary.fail(rerun);
    }
    Ok(summary)
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
        let stamp = summary.read(&String::from_utf8_lossy(&line), clock());
        let stamp = stamp.map(|stamp| format!("{:7.1} s  ", stamp.as_secs_f64()));
        // At once: other programs may write to the same terminal.
        to.write_all(&[stamp.unwrap_or_default().as_bytes(), &line].concat())?;
        to.flush()?;
        line.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_time_since_their_program_started() {
        let mut seconds = 0;
        let clock = || {
            seconds += 1;
            Duration::from_secs(seconds)
        };
        let mut shown = Vec::new();
        let mut summary = Summary::default();
        let printed =
            "     Running tests/a.rs (deps/a-1)\n\nrunning 2 tests\ntest a ... ok\ntest b ... ok\n";
        pass_on(printed.as_bytes(), &mut shown, clock, &mut summary).unwrap();
        let shown = String::from_utf8(shown).unwrap();
        let results: Vec<&str> = shown.lines().filter(|line| line.contains("...")).collect();
        let expected = ["    1.0 s  test a ... ok", "    2.0 s  test b ... ok"];
        assert_eq!(results, expected);
    }

    #[test]
    fn a_program_runs_to_its_end_and_says_what_failed() {
        let mut shell = Command::new("sh");
        let script = "printf '%s\\n' '     Running tests/a.rs (deps/a-1)' >&2; echo failures:; echo '    x::y'; echo; \
                      echo 'test result: FAILED. 0 passed; 1 failed; 0 ignored'; \
                      echo 'error: test failed, to rerun pass `--test a`' >&2; exit 3";
        let mut terminal = Vec::new();
        let ended = follow_to(shell.args(["-c", script]), &mut terminal).expect("it starts");
        let said = ended.to_string();
        let end = "failed: exit status: 3\na, tests/a.rs (cargo test --test a)\n    x::y";
        assert!(said.ends_with(end), "{said}");
        let terminal = String::from_utf8(terminal).unwrap();
        assert!(terminal.starts_with("     Running tests/a.rs (deps/a-1)\nfailures:\n"));
        assert!(terminal.ends_with("to rerun pass `--test a`\n"));

        let reported = |script: &str| {
            let ended = follow_to(Command::new("sh").args(["-c", script]), &mut Vec::new());
            ended
                .expect("it starts")
                .report(Duration::ZERO, Duration::ZERO)
        };
        assert_eq!(reported("echo fine"), Ok(0));
        let warned = reported("echo 'warning: `a` (lib) generated 1 warning'").unwrap_err();
        assert!(
            warned.ends_with("\nwarning: `a` (lib) generated 1 warning"),
            "{warned}"
        );
    }

    #[test]
    fn a_part_of_a_program_says_what_failed() {
        let ended = |script: &str| {
            let mut shell = Command::new("sh");
            let ended = follow_program(shell.args(["-c", script]), "a, a.rs", "-p a --lib");
            ended.expect("it starts")
        };
        let fine = ended("echo 'test x ... ok'; echo 'test result: ok. 1 passed; 0 failed'");
        assert_eq!(
            (fine.to_string(), fine.totals()),
            (
                String::new(),
                "1 test processes: 1 passed, 0 failed, 0 ignored".into()
            )
        );
        let mut all = ended(
            "echo 'test x ... FAILED'; echo failures:; echo '    x'; echo; \
                             echo 'test result: FAILED. 0 passed; 1 failed'; exit 101",
        );
        all.add(ended("exit 134"));
        let expected = "\na, a.rs (cargo test -p a --lib)\n    x\na, a.rs (cargo test -p a --lib)\n    ended before it gave a result";
        assert_eq!(all.to_string(), expected);
        assert_eq!(
            all.totals(),
            "2 test processes: 0 passed, 1 failed, 0 ignored"
        );
    }
}
