//! Test programs in lanes, one beside the other: the tests of one process wait for each other where CubeCL's CPU runtime
//! compiles their kernels, on one thread.

use super::programs::{follow, follow_program};
use super::summary::Summary;
use crate::process::{Result, after, read, shown};
use std::cmp::Reverse;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;
use std::{iter, thread};

/// The most tests of one process. Neighbours share kernels, so that fewer would compile more.
const EACH: usize = 48;

/// Processes for each lane, if all have as many tests: with few, one lane would end long after the others.
const TURNS: usize = 8;

/// The most lanes, however many processors there are: each test may have threads of its own.
const LANES: usize = 8;

/// A test program that cargo has built.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    name: String,
    path: PathBuf,
    /// Folder of its package, in which its tests run.
    folder: PathBuf,
    /// Options of `cargo test` that run it alone, e.g. `-p flash-dma-cpu --lib`.
    rerun: String,
}

/// Builds the test programs of a workspace by the `cargo test` that `cargo` makes of further options, and runs their tests
/// that are `wanted`, and those of the documentation if `documented`. Returns the number of tests that passed; the error
/// names each test that failed, and each crate with warnings.
pub fn run(
    cargo: impl Fn(&[&str]) -> Command + Sync,
    wanted: impl Fn(&str) -> bool,
    documented: bool,
) -> Result<usize> {
    let start = Instant::now();
    let format = "json-render-diagnostics";
    let (programs, mut all) = built(&mut cargo(&["--no-run", "--message-format", format]))?;
    let built = start.elapsed();
    let mut tests = Vec::new();
    for program in programs {
        let mut names = program.names()?;
        names.retain(|name| wanted(name));
        tests.push((program, names));
    }
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let lanes = processors.min(LANES);
    let jobs = jobs(&tests, lanes);
    let queue = Mutex::new(jobs.into_iter());
    let next = || queue.lock().expect("no lane panics").next();
    let lane = || {
        iter::from_fn(next)
            .map(|(program, names)| program.run(names))
            .collect()
    };
    let ended: Vec<Result<Vec<Summary>>> = thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        let documentation = documented.then(|| Ok(vec![follow(&mut cargo(&["--doc"]))?]));
        let lanes = lanes
            .into_iter()
            .map(|lane| lane.join().expect("no lane panics"));
        lanes.chain(documentation).collect()
    });
    for of_lane in ended {
        of_lane?.into_iter().for_each(|ran| all.add(ran));
    }
    all.report(built, start.elapsed())
}

/// The tests of each process. Programs of few tests end the queue.
fn jobs<P>(tests: &[(P, Vec<String>)], lanes: usize) -> Vec<(&P, &[String])> {
    let all: usize = tests.iter().map(|(_, names)| names.len()).sum();
    let each = (all / (TURNS * lanes)).clamp(1, EACH);
    let mut jobs = Vec::new();
    for (program, names) in tests {
        jobs.extend(names.chunks(each).map(|names| (program, names)));
    }
    jobs.sort_by_key(|(_, names)| Reverse(names.len()));
    jobs
}

/// The test programs that a command builds, and the crates with warnings.
fn built(command: &mut Command) -> Result<(Vec<Program>, Summary)> {
    let name = shown(command);
    let cannot = |e| format!("cannot run {name}: {e}");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(cannot)?;
    let (mut stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let mut all = Summary::default();
    let mut messages = String::new();
    thread::scope(|scope| {
        let reader = scope.spawn(|| match &mut stdout {
            Some(stdout) => stdout.read_to_string(&mut messages),
            None => Ok(0),
        });
        for line in stderr
            .into_iter()
            .flat_map(|stderr| BufReader::new(stderr).lines())
        {
            let line = line?;
            eprintln!("{line}");
            all.warn(&line);
        }
        reader.join().expect("reading does not panic")
    })
    .map_err(cannot)?;
    let status = child.wait().map_err(cannot)?;
    match status.success() {
        true => Ok((messages.lines().filter_map(program).collect(), all)),
        false => Err(format!("{name} failed: {status}{all}")),
    }
}

/// Test program of one of cargo's messages.
fn program(message: &str) -> Option<Program> {
    let path = after(message, "\"executable\":\"")?;
    let folder = Path::new(after(message, "\"manifest_path\":\"")?).parent()?;
    let (target, rest) = message
        .split_once("\"target\":{")?
        .1
        .split_once("\"profile\":{")?;
    if !rest.split_once('}')?.0.contains("\"test\":true") {
        return None;
    }
    let id = after(message, "\"package_id\":\"")?.rsplit_once('#')?.1;
    let package = match id.split_once('@') {
        Some((package, _version)) => package,
        None => folder.file_name()?.to_str()?,
    };
    let name = after(target, "\"name\":\"")?;
    let source = Path::new(after(target, "\"src_path\":\"")?);
    let source = source.strip_prefix(folder).unwrap_or(source).display();
    let (name, option) = match after(target, "\"kind\":[\"")? {
        "test" => (format!("{name}, {source}"), format!("--test {name}")),
        "bin" => (
            format!("unit tests of {name}, {source}"),
            format!("--bin {name}"),
        ),
        _ => (format!("unit tests of {name}, {source}"), "--lib".into()),
    };
    Some(Program {
        name,
        path: path.into(),
        folder: folder.into(),
        rerun: format!("-p {package} {option}"),
    })
}

impl Program {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.folder);
        command
    }

    fn names(&self) -> Result<Vec<String>> {
        let listing = read(self.command().args(["--list", "--format", "terse"]))?;
        let names = listing
            .lines()
            .filter_map(|line| line.strip_suffix(": test"));
        Ok(names.map(str::to_owned).collect())
    }

    /// Runs the tests of these names. What they print is shown if one fails.
    fn run(&self, names: &[String]) -> Result<Summary> {
        println!("     Running {} tests of {}", names.len(), self.name);
        let mut command = self.command();
        follow_program(command.arg("--exact").args(names), &self.name, &self.rerun)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_test_is_in_one_process() {
        let names = |count| (0..count).map(|n: usize| n.to_string()).collect::<Vec<_>>();
        let tests = [("few", names(3)), ("many", names(2000)), ("none", names(0))];
        let all = jobs(&tests, 2);
        let sizes: Vec<_> = all.iter().map(|(_, names)| names.len()).collect();
        assert_eq!((sizes[0], sizes[40..].to_vec()), (EACH, vec![EACH, 32, 3]));
        let of_many = all.iter().filter(|(program, _)| **program == "many");
        let of_many: Vec<_> = of_many.flat_map(|(_, names)| names.to_vec()).collect();
        assert_eq!(of_many, names(2000));
        // Some processes for each lane, of few tests as well.
        assert_eq!(jobs(&tests[..1], 2).len(), 3);
        assert_eq!(jobs(&[((), names(225))], 2).len(), 17);
    }

    #[test]
    fn test_programs_are_read_from_cargo_messages() {
        let test = r#"{"reason":"compiler-artifact","package_id":"path+file:///r/tests#flash-dma-tests@0.1.0","manifest_path":"/r/tests/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"main","src_path":"/r/tests/tests/main.rs","edition":"2024"},"profile":{"opt_level":"0","test":true},"features":[],"filenames":["/t/main-1"],"executable":"/t/main-1","fresh":false}"#;
        let main = Program {
            name: "main, tests/main.rs".into(),
            path: "/t/main-1".into(),
            folder: "/r/tests".into(),
            rerun: "-p flash-dma-tests --test main".into(),
        };
        assert_eq!(program(test), Some(main));
        let library = (test.replace("[\"test\"]", "[\"lib\"]"))
            .replace("#flash-dma-tests@", "#")
            .replace("tests/main.rs", "src/lib.rs");
        let library = program(&library).expect("one");
        let expected = ["unit tests of main, src/lib.rs", "-p tests --lib"];
        assert_eq!([library.name, library.rerun], expected);
        assert_eq!(
            program(&test.replace("\"test\":true", "\"test\":false")),
            None
        );
        assert_eq!(program(&test.replace("\"/t/main-1\"", "null")), None);
    }
}
