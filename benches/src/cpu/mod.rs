//! `bench cpu`: the CPU engine against the dense attention of Burn's Flex backend, in one run.
//!
//! Our engine is timed end to end: selection, then attention with scores and grouped query heads. Flex gets the
//! cheaper problem, plain causal attention without scores, with its keys and values repeated for every query head
//! before timing starts (Burn's attention has no grouped heads). `forward+backward` of Flex is a step under autodiff,
//! which materialises the attention matrix; it is left out where that would take too much memory. Each round times
//! Flex once and every window once, so both see the same machine. Before that, our engine, with every key kept and
//! zero scores, is checked against Flex.

mod case;

use crate::Result;
use crate::options::{Common, output};
use crate::stats::Millis;
use case::{Buffers, Case};
use clap::Args;
use serde::Serialize;
use std::time::Instant;

/// Times the CPU engine against Burn Flex's dense attention.
#[derive(Args, Debug)]
pub struct Options {
    /// Sequence lengths.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 1024, 2048, 4096, 8192])]
    lengths: Vec<usize>,
    /// Elements per row.
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
    /// Heads of q.
    #[arg(long, default_value_t = 8)]
    q_heads: usize,
    /// Heads of k and v.
    #[arg(long, default_value_t = 2)]
    kv_heads: usize,
    /// Maximum memory for Flex's backward pass, in GiB; longer sequences are left out.
    #[arg(long, default_value_t = 6.0)]
    flex_gib: f64,
    #[command(flatten)]
    common: Common,
}

const FORWARD: &str = "forward";
const PHASES: [&str; 2] = [FORWARD, "forward+backward"];

/// Approximate number of N x N matrices of all heads that Flex holds at once in a step under autodiff.
const MATRICES: f64 = 6.0;

#[derive(Serialize)]
struct Report {
    machine: String,
    threads: usize,
    commit: String,
    date: String,
    rounds: usize,
    /// Load average over the minute before the run: above 1, other processes were using the machine.
    load: String,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    workload: String,
    n: usize,
    w: usize,
    heads: String,
    d: usize,
    phase: &'static str,
    /// Medians.
    ours_ms: f64,
    flex_ms: f64,
    /// Flex's time divided by ours: above 1, ours is faster.
    ratio: f64,
    /// Minimum and maximum ratio of a round.
    spread: [f64; 2],
    /// Medians of the processor time of all threads, which other processes hardly change.
    ours_cpu_ms: f64,
    flex_cpu_ms: f64,
    cpu_ratio: f64,
}

/// Times the lengths.
pub fn run(options: &Options) -> Result {
    if options.common.baseline.is_some() {
        return Err("--baseline: these rows are compared with Flex, in the same run".into());
    }
    let mut report = Report {
        machine: machine(),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        commit: options.common.commit.clone(),
        date: output("date", &["-u", "+%Y-%m-%d %H:%M UTC"]),
        rounds: options.common.runs,
        load: std::fs::read_to_string("/proc/loadavg").unwrap_or_default(),
        rows: Vec::new(),
    };
    println!("{}, {} threads", report.machine, report.threads);
    println!(
        "{:>6} {:>6} {:<17} {:>10} {:>10} {:>7}  {:<14} {:>10} {:>10} {:>7}",
        "N", "w", "phase", "ours ms", "Flex ms", "ratio", "spread", "ours cpu", "Flex cpu", "ratio"
    );
    for &n in &options.lengths {
        let case = Case::new(options, n);
        case.check();
        let windows = [n / 16, n / 8, n / 4, n / 2, n];
        let matrix = (options.q_heads * n * n * 4) as f64 / f64::from(1 << 30);
        let needed = matrix * MATRICES;
        for phase in PHASES {
            if phase == FORWARD || needed <= options.flex_gib {
                report
                    .rows
                    .extend(time_phase(options, &case, phase, &windows));
            } else {
                println!(
                    "{n:>6} {:>6} {phase}: Flex would need about {needed:.0} GiB",
                    ""
                );
            }
        }
    }
    for phase in PHASES {
        for &n in &options.lengths {
            let rows = || report.rows.iter().filter(|r| r.phase == phase && r.n == n);
            let won = rows().take_while(|r| r.ratio > 1.0).map(|r| r.w).last();
            if rows().next().is_some() {
                let won = won.map_or("no window".into(), |w| format!("w = {w}"));
                println!("{phase}, N = {n}: ours is faster up to {won}");
            }
        }
    }
    options.common.write(&report)
}

/// Times every window together with Flex, and prints the rows.
fn time_phase(options: &Options, case: &Case, phase: &'static str, windows: &[usize]) -> Vec<Row> {
    let backward = phase != FORWARD;
    let mut buffers = Buffers::new(case);
    let mut flex = Vec::new();
    let mut ours = vec![Vec::new(); windows.len()];
    for round in 0..=options.common.runs {
        let flex_time = Time::of(|| case.flex(backward));
        let ours_time = windows.iter().map(|&w| {
            let problem = case.problem(w);
            Time::of(|| {
                case.ours(&problem, &case.scores, &mut buffers, backward)
                    .expect("the arguments fit the problem");
            })
        });
        let ours_time: Vec<Time> = ours_time.collect();
        // The first round is the warm-up.
        if round > 0 {
            flex.push(flex_time);
            for (all, time) in ours.iter_mut().zip(ours_time) {
                all.push(time);
            }
        }
    }
    let row = |(&w, ours): (&usize, Vec<Time>)| {
        let all = |times: &[Time], of: fn(&Time) -> f64| median(times.iter().map(of).collect());
        let ratios = |of: fn(&Time) -> f64| -> Vec<f64> {
            let pairs = flex.iter().zip(&ours);
            pairs.map(|(flex, ours)| of(flex) / of(ours)).collect()
        };
        let elapsed = ratios(|t| t.elapsed);
        let (heads, kv_heads, d, n) = (options.q_heads, options.kv_heads, options.head_dim, case.n);
        let row = Row {
            workload: format!("h{heads}-{kv_heads}-d{d}-n{n}-w{w}"),
            n,
            w,
            heads: format!("{heads}/{kv_heads}"),
            d,
            phase,
            ours_ms: all(&ours, |t| t.elapsed),
            flex_ms: all(&flex, |t| t.elapsed),
            spread: [
                elapsed.iter().copied().fold(f64::INFINITY, f64::min),
                elapsed.iter().copied().fold(0.0, f64::max),
            ],
            ratio: median(elapsed),
            ours_cpu_ms: all(&ours, |t| t.cpu),
            flex_cpu_ms: all(&flex, |t| t.cpu),
            cpu_ratio: median(ratios(|t| t.cpu)),
        };
        println!(
            "{:>6} {:>6} {:<17} {:>10.2} {:>10.2} {:>7.2}  {:>6.2}-{:<7.2} {:>10.2} {:>10.2} {:>7.2}",
            row.n,
            row.w,
            row.phase,
            row.ours_ms,
            row.flex_ms,
            row.ratio,
            row.spread[0],
            row.spread[1],
            row.ours_cpu_ms,
            row.flex_cpu_ms,
            row.cpu_ratio,
        );
        row
    };
    windows.iter().zip(ours).map(row).collect()
}

/// Milliseconds of one call.
#[derive(Clone)]
struct Time {
    elapsed: f64,
    /// Processor time of all threads.
    cpu: f64,
}

impl Time {
    fn of(run: impl FnOnce()) -> Self {
        let (start, cpu) = (Instant::now(), cpu_millis());
        run();
        Self {
            elapsed: start.elapsed().as_secs_f64() * 1e3,
            cpu: cpu_millis() - cpu,
        }
    }
}

fn median(sample: Vec<f64>) -> f64 {
    Millis::of(sample).median
}

/// The kernel's name of the processor.
fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let [name, family, model] = ["model name", "cpu family", "model\t"].map(|name| {
        let line = info.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split(": ").nth(1)).unwrap_or("?")
    });
    format!("{name} family {family} model {model}")
}

/// Processor time of all threads of this process so far, in milliseconds; NaN if the kernel does not report it
/// (Linux's `schedstat`). Unlike elapsed time, it hardly depends on other processes.
fn cpu_millis() -> f64 {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
        return f64::NAN;
    };
    let nanos = threads.flatten().map(|thread| {
        let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanos
        .sum::<Option<f64>>()
        .map_or(f64::NAN, |nanos| nanos / 1e6)
}
