//! `fuzz --engine NAME`: random problems on an engine of the build, compared with the oracle.

use flash_dma_tests::engine::shared;
use flash_dma_tests::engines;
use flash_dma_tests::fuzz::{
    self, CHOICES, Choice, Failure, Fuzzed, Limits, Outcome, Palette, Profile, Record, Share, Spec,
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
  --processes P        Processes beside each other: a device compiles for one process at a time, and each of these
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

/// The requested options.
struct Options {
    engine: String,
    minutes: f64,
    problems: u64,
    seed: u64,
    threads: usize,
    processes: usize,
    share: Share,
    variants: Option<usize>,
    effort: f64,
    elements: Option<Vec<String>>,
    only: Option<Choice>,
    failures: usize,
    shrink: bool,
    record: Option<String>,
    require_cells: u64,
    require_options: u64,
    problem: Option<String>,
    list: Option<u64>,
}

/// The engines of the build.
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
        let names: Vec<&str> = ENGINES.iter().map(|(name, _)| *name).collect();
        print!("{HELP}\nEngines of this build: {}\n", names.join(", "));
        return ExitCode::SUCCESS;
    }
    match Options::parse(&args).and_then(|options| run(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<bool, String> {
    let engine = ENGINES.iter().find(|(name, _)| *name == options.engine);
    let (_, run) = engine.ok_or_else(|| {
        let names: Vec<&str> = ENGINES.iter().map(|(name, _)| *name).collect();
        let (name, names) = (&options.engine, names.join(", "));
        format!("this build has no engine `{name}`, only {names}")
    })?;
    run(options)
}

impl Options {
    fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self {
            engine: String::new(),
            minutes: 1.0,
            problems: u64::MAX,
            seed: 1,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            processes: 1,
            share: Share::ALL,
            variants: None,
            effort: 1.0,
            elements: None,
            only: None,
            failures: 1,
            shrink: true,
            record: None,
            require_cells: 0,
            require_options: 0,
            problem: None,
            list: None,
        };
        let mut args = args.iter();
        while let Some(name) = args.next() {
            if name == "--no-shrink" {
                options.shrink = false;
                continue;
            }
            let value = args
                .next()
                .ok_or_else(|| format!("`{name}` wants a value"))?;
            match name.as_str() {
                "--engine" => options.engine.clone_from(value),
                "--minutes" => options.minutes = number(name, value)?,
                "--problems" => options.problems = number(name, value)?,
                "--seed" => options.seed = number(name, value)?,
                "--threads" => options.threads = number(name, value)?,
                "--processes" => options.processes = number(name, value)?,
                "--share" => options.share = share(value)?,
                "--variants" => options.variants = Some(number(name, value)?),
                "--effort" => options.effort = number(name, value)?,
                "--elements" => {
                    options.elements = Some(value.split(',').map(str::to_owned).collect());
                }
                "--only" => {
                    let option = CHOICES.iter().find(|option| option.name == value);
                    options.only = Some(*option.ok_or_else(|| format!("no option is `{value}`"))?);
                }
                "--failures" => options.failures = number(name, value)?,
                "--record" => options.record = Some(value.clone()),
                "--require-cells" => options.require_cells = number(name, value)?,
                "--require-options" => options.require_options = number(name, value)?,
                "--problem" => options.problem = Some(value.clone()),
                "--list" => options.list = Some(number(name, value)?),
                _ => return Err(format!("unknown option `{name}`\n\n{HELP}")),
            }
        }
        let minutes = options.minutes;
        // A hundred years: a greater value is not a valid duration.
        if !(0.0..=5e7).contains(&minutes) {
            return Err(format!("{minutes} minutes"));
        }
        Ok(options)
    }
}

fn number<T: core::str::FromStr>(name: &str, value: &str) -> Result<T, String> {
    value
        .parse()
        .map_err(|_| format!("`{name}` wants a number, not `{value}`"))
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
fn in_processes(options: &Options) -> Result<Record, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let record = |process: usize| -> PathBuf {
        let name = format!("fuzz-{}-{process}.json", std::process::id());
        std::env::temp_dir().join(name)
    };
    let children = (0..options.processes).map(|process| {
        let share = format!("{process}/{}", options.processes);
        let mut child = Command::new(&program);
        // If an option is given twice, the last one counts.
        child.args(std::env::args().skip(1));
        child.args(["--processes", "1", "--require-cells", "0"]);
        child.args(["--require-options", "0"]);
        child
            .args(["--share", &share])
            .arg("--record")
            .arg(record(process));
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

/// Runs on one engine; returns whether everything was right.
fn on<E: Fuzzed>(options: &Options) -> Result<bool, String> {
    let engine = shared::<E>();
    let mut profile = Profile::of(engine);
    if let Some(names) = &options.elements {
        profile
            .elements
            .retain(|element| names.contains(&element.to_string()));
    }
    if profile.elements.is_empty() {
        return Err(format!("{} has none of the element types", options.engine));
    }
    profile.variants = options.variants.unwrap_or(profile.variants);
    profile.effort = options.effort;
    let palette = Palette::new(profile.clone(), options.seed);
    if let Some(count) = options.list {
        (0..count).for_each(|number| println!("{}", palette.draw(number)));
        return Ok(true);
    }
    // Only one line of a problem's panic is printed, below.
    std::panic::set_hook(Box::new(|_| {}));
    if let Some(line) = &options.problem {
        return Ok(single(engine, options, &line.parse()?));
    }
    let limits = Limits {
        problems: options.problems,
        share: options.share,
        time: Duration::from_secs_f64(60.0 * options.minutes),
        failures: options.failures,
        only: options.only,
        threads: options.threads,
        progress: if options.share.process == 0 { 10 } else { 0 },
    };
    let begin = Instant::now();
    let (record, failures) = match options.processes {
        0 | 1 => fuzz::fuzz(engine, &palette, &limits),
        // The processes print their failures themselves.
        _ => (in_processes(options)?, Vec::new()),
    };
    let seconds = begin.elapsed().as_secs_f64();
    if let Some(path) = &options.record {
        write(path, options, &profile, &record, seconds)?;
    }
    if options.share == Share::ALL {
        println!(
            "\n{} with seed {}, {seconds:.0} s",
            options.engine, options.seed
        );
        print!("{record}");
    }
    for failure in &failures {
        say(options, failure);
    }
    if let (Some(first), true) = (failures.first(), options.shrink) {
        shrink(engine, options, &first.spec);
    }
    let wanting = record.wanting(options.require_cells, &profile.elements, profile.decodes);
    if options.require_cells > 0 && !wanting.is_empty() {
        println!(
            "fewer than {}: {}",
            options.require_cells,
            wanting.join("; ")
        );
        return Ok(false);
    }
    let rare = record.rare(options.require_options, &profile);
    if !rare.is_empty() {
        println!(
            "fewer than {}: {}",
            options.require_options,
            rare.join("; ")
        );
        return Ok(false);
    }
    if record.counted() == 0 && options.share == Share::ALL {
        println!("no problem counted");
        return Ok(false);
    }
    Ok(record.failed == 0)
}

/// Runs one problem.
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
            say(
                options,
                &Failure {
                    spec: spec.clone(),
                    what,
                },
            );
            if options.shrink {
                shrink(engine, options, &spec);
            }
            false
        }
    }
}

fn say(options: &Options, failure: &Failure) {
    let Failure { spec, what } = failure;
    println!(
        "WRONG: fuzz --engine {} --problem '{spec}'\n{what}",
        options.engine
    );
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

fn write(
    path: &str,
    options: &Options,
    profile: &Profile,
    record: &Record,
    seconds: f64,
) -> Result<(), String> {
    let json = record.json(&[
        ("engine", options.engine.clone().into()),
        ("seed", options.seed.into()),
        ("seconds", seconds.round().into()),
        ("processes", options.processes.into()),
        ("threads", options.threads.into()),
        ("variants", profile.variants.into()),
        ("effort", profile.effort.into()),
    ]);
    std::fs::write(path, format!("{json:#}\n")).map_err(|error| format!("{path}: {error}"))
}
