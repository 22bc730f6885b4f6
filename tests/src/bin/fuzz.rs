//! `fuzz --engine NAME`: random problems on an engine of the build, compared with the oracle.

use flash_dma_problem::ElementType;
use flash_dma_tests::engine::shared;
use flash_dma_tests::engines;
use flash_dma_tests::fuzz::{
    self, CHOICES, Failure, Fuzzed, Limits, Outcome, Palette, Profile, Record, Share, Spec,
    regression_test, shrunk,
};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

const HELP: &str = "\
Usage: fuzz --engine NAME [..]

  --engine NAME        What computes, of the list below.
  --minutes M          The longest time (default 1).
  --problems N         The most problems (default: no limit but the time).
  --seed S             Of the problems (default 1).
  --threads T          Host threads of a process (default: one for each core).
  --processes P        Processes at once: a device compiles for one process at a time, and each of these
                       compiles the kernels of its own variants (default 1).
  --variants N         Combinations that kernels are compiled for (default: by engine); 0 for no bound.
  --effort X           Factor on the size of the problems (default 1).
  --elements A,B       Element types, of f32, f16 and bf16 (default: all that the device has).
  --only OPTION        Run the problems with this option alone, of the names in a record; --problems counts the others, too.
  --failures N         Failures that end a process (default 1).
  --no-shrink          Leave failures as they are.
  --record FILE        Write what was seen as JSON.
  --require-cells N    Fail if a pass has seen fewer problems in an element type.
  --require-options N  Fail if an option that the engine has was in fewer problems.
  --problem LINE       Run this problem alone.
  --list N             Print the first N problems, and run none.
  --share K/P          Of P processes' problems those of number K, from 0: what --processes starts.
";

type Entry = (&'static str, fn(&Options) -> Result<bool, String>);

const ENGINES: &[Entry] = &[
    ("cpu", on::<engines::Cpu>),
    #[cfg(feature = "cpu")]
    ("kernels-cpu", on::<engines::KernelsOnCpu>),
    #[cfg(feature = "cuda")]
    ("cuda", on::<engines::KernelsOnCuda>),
    #[cfg(feature = "cuda")]
    ("cuda-mma", on::<engines::KernelsOnCudaMma>),
    #[cfg(feature = "cuda")]
    ("cuda-wgmma", on::<engines::KernelsOnCudaWgmma>),
    #[cfg(feature = "cuda")]
    ("cuda-portable", on::<engines::KernelsOnCudaPortable>),
    #[cfg(all(feature = "wgpu", not(feature = "vulkan")))]
    ("wgpu", on::<engines::KernelsOnWgpu>),
    #[cfg(feature = "vulkan")]
    ("vulkan", on::<engines::KernelsOnVulkan>),
    #[cfg(feature = "flex")]
    ("burn-flex", on::<engines::BurnOnFlex>),
    #[cfg(feature = "cuda")]
    ("burn-cuda", on::<engines::BurnOnCuda>),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.is_empty() || args.iter().any(|arg| arg == "--help") {
        print!("{HELP}\nEngines of this build: {}\n", names());
        return ExitCode::SUCCESS;
    }
    match Options::parse(args).and_then(|options| run(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn names() -> String {
    let names: Vec<&str> = ENGINES.iter().map(|(name, _)| *name).collect();
    names.join(", ")
}

fn run(options: &Options) -> Result<bool, String> {
    let wanted = options.engine();
    let engine = ENGINES.iter().find(|(name, _)| *name == wanted);
    let none = || format!("this build has no engine `{wanted}`, only {}", names());
    let (_, run) = engine.ok_or_else(none)?;
    run(options)
}

/// The requested options with their values, each of them listed by [`HELP`].
struct Options(Vec<(String, String)>);

impl Options {
    fn parse(args: Vec<String>) -> Result<Self, String> {
        let is_known = |name: &str| {
            let mut lines = HELP.lines();
            let lists = |line: &str| line.split_whitespace().next() == Some(name);
            name.starts_with("--") && lines.any(lists)
        };
        let (mut options, mut args) = (Vec::new(), args.into_iter());
        while let Some(name) = args.next() {
            if !is_known(&name) {
                return Err(format!("unknown option `{name}`\n\n{HELP}"));
            }
            let value = match &name[..] {
                "--no-shrink" => String::new(),
                _ => (args.next()).ok_or_else(|| format!("`{name}` wants a value"))?,
            };
            options.push((name, value));
        }
        Ok(Self(options))
    }

    /// The value of an option. If it is given twice, the last one counts.
    fn text(&self, name: &str) -> Option<&str> {
        let mut given = self.0.iter().rev();
        let (_, value) = given.find(|(given, _)| given == name)?;
        Some(value)
    }

    fn number<T: core::str::FromStr>(&self, name: &str) -> Result<Option<T>, String> {
        let Some(value) = self.text(name) else {
            return Ok(None);
        };
        let number = value.parse::<T>().map(Some);
        number.map_err(|_| format!("`{name}` wants a number, not `{value}`"))
    }

    fn engine(&self) -> &str {
        self.text("--engine").unwrap_or_default()
    }

    fn shrinks(&self) -> bool {
        self.text("--no-shrink").is_none()
    }

    fn limits(&self) -> Result<Limits, String> {
        let minutes: f64 = self.number("--minutes")?.unwrap_or(1.0);
        // A hundred years: a greater value is not a valid duration.
        if !(0.0..=5e7).contains(&minutes) {
            return Err(format!("{minutes} minutes"));
        }
        let only = self.text("--only").map(|name| {
            let option = CHOICES.iter().copied().find(|option| option.name == name);
            option.ok_or_else(|| format!("no option is `{name}`"))
        });
        let share = self.text("--share").map_or(Ok(Share::ALL), share)?;
        let threads = || std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Limits {
            problems: self.number("--problems")?.unwrap_or(u64::MAX),
            share,
            time: Duration::from_secs_f64(60.0 * minutes),
            failures: self.number("--failures")?.unwrap_or(1),
            only: only.transpose()?,
            threads: self.number("--threads")?.unwrap_or_else(threads),
            progress: if share.process == 0 { 10 } else { 0 },
        })
    }
}

fn share(value: &str) -> Result<Share, String> {
    let parts = value.split_once('/');
    let numbers = parts.and_then(|(k, p)| Some((k.parse().ok()?, p.parse().ok()?)));
    match numbers {
        Some((process, processes)) if process < processes => Ok(Share { process, processes }),
        _ => Err(format!("`--share` wants K/P with K below P, not `{value}`")),
    }
}

/// Starts the processes of a run, and joins their records.
fn in_processes(processes: usize) -> Result<Record, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let record = |process: usize| -> PathBuf {
        let name = format!("fuzz-{}-{process}.json", std::process::id());
        std::env::temp_dir().join(name)
    };
    let children = (0..processes).map(|process| {
        let share = format!("{process}/{processes}");
        let mut child = Command::new(&program);
        // If an option is given twice, the last one counts.
        child.args(std::env::args().skip(1));
        child.args(["--processes", "1", "--require-cells", "0"]);
        child.args(["--require-options", "0", "--share", &share]);
        child.arg("--record").arg(record(process));
        child.spawn().map_err(|error| error.to_string())
    });
    let children: Vec<_> = children.collect::<Result<_, _>>()?;
    let mut joined = Record::default();
    for (process, mut child) in children.into_iter().enumerate() {
        child.wait().map_err(|error| error.to_string())?;
        let path = record(process);
        let read = |path: &PathBuf| -> Option<Record> {
            Record::of_json(&serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()?)
        };
        let seen = read(&path);
        joined.join(seen.ok_or(format!("process {process} ended without a record"))?);
        // The file is in a directory that the system cleans up.
        let _ = std::fs::remove_file(path);
    }
    Ok(joined)
}

/// Runs on one engine; returns true if everything was right.
fn on<E: Fuzzed>(options: &Options) -> Result<bool, String> {
    let engine = shared::<E>();
    let mut profile = Profile::of(engine);
    if let Some(names) = options.text("--elements") {
        let is_named = |e: &ElementType| names.split(',').any(|name| name == e.to_string());
        profile.elements.retain(is_named);
    }
    if profile.elements.is_empty() {
        let engine = options.engine();
        return Err(format!("{engine} has none of the element types"));
    }
    profile.variants = options.number("--variants")?.unwrap_or(profile.variants);
    profile.effort = options.number("--effort")?.unwrap_or(1.0);
    let limits = options.limits()?;
    let seed: u64 = options.number("--seed")?.unwrap_or(1);
    let processes: usize = options.number("--processes")?.unwrap_or(1);
    let require_cells: u64 = options.number("--require-cells")?.unwrap_or(0);
    let require_options: u64 = options.number("--require-options")?.unwrap_or(0);
    let palette = Palette::new(profile.clone(), seed);
    if let Some(count) = options.number::<u64>("--list")? {
        (0..count).for_each(|number| println!("{}", palette.draw(number)));
        return Ok(true);
    }
    // Only one line of a problem's panic is printed, below.
    std::panic::set_hook(Box::new(|_| {}));
    if let Some(line) = options.text("--problem") {
        return Ok(single(engine, options, &line.parse()?));
    }
    let begin = Instant::now();
    let (record, failures) = match processes {
        0 | 1 => fuzz::fuzz(engine, &palette, &limits),
        // The processes print their failures themselves.
        _ => (in_processes(processes)?, Vec::new()),
    };
    let seconds = begin.elapsed().as_secs_f64();
    if let Some(path) = options.text("--record") {
        let json = record.json(&[
            ("engine", options.engine().into()),
            ("seed", seed.into()),
            ("seconds", seconds.round().into()),
            ("processes", processes.into()),
            ("threads", limits.threads.into()),
            ("variants", profile.variants.into()),
            ("effort", profile.effort.into()),
        ]);
        std::fs::write(path, format!("{json:#}\n")).map_err(|error| format!("{path}: {error}"))?;
    }
    let is_whole = limits.share == Share::ALL;
    if is_whole {
        let name = options.engine();
        println!("\n{name} with seed {seed}, {seconds:.0} s");
        print!("{record}");
    }
    for failure in &failures {
        say(options, failure);
    }
    if let (Some(first), true) = (failures.first(), options.shrinks()) {
        shrink(engine, options, &first.spec);
    }
    let wanting = match require_cells {
        0 => Vec::new(),
        least => record.wanting(least, &profile.elements, profile.decodes),
    };
    let rare = record.rare(require_options, &profile);
    for (least, few) in [(require_cells, wanting), (require_options, rare)] {
        if !few.is_empty() {
            println!("fewer than {least}: {}", few.join("; "));
            return Ok(false);
        }
    }
    if record.counted() == 0 && is_whole {
        println!("no problem counted");
        return Ok(false);
    }
    Ok(record.failed == 0)
}

fn single<E: Fuzzed>(engine: &E, options: &Options, spec: &Spec) -> bool {
    match fuzz::run(engine, spec) {
        Outcome::Passed(passed) => {
            println!("right: {spec}\n{passed:?}");
            true
        }
        Outcome::Skipped(why) => {
            println!("does not count: {why}");
            false
        }
        Outcome::Failed(what) => {
            let spec = spec.clone();
            let failure = Failure { spec, what };
            say(options, &failure);
            if options.shrinks() {
                shrink(engine, options, &failure.spec);
            }
            false
        }
    }
}

fn say(options: &Options, failure: &Failure) {
    let (Failure { spec, what }, engine) = (failure, options.engine());
    println!("WRONG: fuzz --engine {engine} --problem '{spec}'\n{what}");
}

fn shrink<E: Fuzzed>(engine: &E, options: &Options, spec: &Spec) {
    match shrunk(engine, spec) {
        None => println!("It passes when it is run again."),
        Some(failure) => {
            println!("\nshrunk:");
            say(options, &failure);
            println!("\n{}", regression_test(&failure.spec));
        }
    }
}
