//! Times the CubeCL kernels on one device and writes one row per (workload, phase).
//!
//! ```text
//! cargo run --release -p flash-dma-benches --features cuda --bin bench -- --runtime cuda
//! ```
//!
//! Times are device times (events) of whole calls: a phase includes everything its public function
//! launches. `cold` is the host's time from the first call of a process to its finished result:
//! generating, compiling and loading every kernel. Before it is timed, each workload is checked:
//! every interval against a heap, sampled rows of the output and of every gradient against f64.

use clap::Parser;
use cubecl::client::Client;
use cubecl::future::block_on;
use flash_dma_benches::buffers::{Buffers, Host, client_or_exit, device_time, engine_name};
use flash_dma_benches::check::check;
use flash_dma_benches::gradients::check_gradients;
use flash_dma_benches::roof::Roof;
use flash_dma_benches::rows::{Phase, Row};
use flash_dma_benches::spread::spread;
use flash_dma_benches::stats::Millis;
use flash_dma_benches::workloads::{WORKLOADS, Workload, find};
use flash_dma_kernels::Engine;
use flash_dma_kernels::internals::Tuning;
use std::time::Instant;

/// Times selection, forward and backward of the CubeCL kernels.
#[derive(Parser)]
struct Args {
    /// The runtime: cpu, cuda or wgpu, if compiled in.
    #[arg(long)]
    runtime: String,
    /// Workloads by name; all of them by default.
    #[arg(long, value_delimiter = ',')]
    workloads: Vec<String>,
    /// Phases by the names that the rows have, as select, forward or backward-runners-up; all of them by default.
    #[arg(long, value_delimiter = ',')]
    phases: Vec<String>,
    /// Timed calls per phase.
    #[arg(long, default_value_t = 9)]
    runs: usize,
    /// The forward engine: portable, mma or wgmma; by default the one that `forward` selects.
    #[arg(long)]
    engine: Option<String>,
    /// Warps of a cube of the forward engine; several are timed one after the other.
    #[arg(long, value_delimiter = ',')]
    warps: Vec<usize>,
    /// Parts into which the forward engine splits the keys of a query tile, likewise; 1 does not split.
    #[arg(long, value_delimiter = ',')]
    parts: Vec<usize>,
    /// The backward engine, likewise.
    #[arg(long)]
    backward_engine: Option<String>,
    /// Repeat the backward pass this many times and print how far each gradient deviates from the first.
    #[arg(long, default_value_t = 0)]
    repeats: usize,
    /// The device's measured roof, as `benches/roof.py` prints it.
    #[arg(long)]
    roof: Option<std::path::PathBuf>,
    /// Write the rows to this file as a JSON array.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// The commit that was built, for the rows.
    #[arg(long, default_value = option_env!("FLASH_DMA_COMMIT").unwrap_or("unknown"))]
    commit: String,
}

fn main() {
    let args = Args::parse();
    let client = client_or_exit(&args.runtime);
    let chosen: Vec<&Workload> = if args.workloads.is_empty() {
        WORKLOADS.iter().collect()
    } else {
        let known = |name: &String| {
            find(name).unwrap_or_else(|| {
                eprintln!("no workload `{name}`");
                std::process::exit(2);
            })
        };
        args.workloads.iter().map(known).collect()
    };
    let roof: Option<Roof> = args.roof.as_ref().map(|path| {
        let text = std::fs::read_to_string(path).map_err(|e| e.to_string());
        let roof = text.and_then(|text| serde_json::from_str(&text).map_err(|e| e.to_string()));
        roof.unwrap_or_else(|e| {
            eprintln!("{}: {e}", path.display());
            std::process::exit(2);
        })
    });
    let mut rows = Vec::new();
    for workload in chosen {
        for row in bench(&client, workload, &args, roof.as_ref()) {
            println!(
                "{:24} {:10} {:8} {:10.4} ms [{:.4}, {:.4}] {:>7} TFLOP/s, host {:>6} us, io {:.0} MiB, workspace {:.0} MiB",
                row.workload,
                row.phase.name(),
                row.engine,
                row.ms.median,
                row.ms.q1,
                row.ms.q3,
                row.tflops.map_or("-".into(), |t| format!("{t:.2}")),
                row.host_us.map_or("-".into(), |t| format!("{t:.1}")),
                row.io_mib,
                row.workspace_mib,
            );
            rows.push(row);
        }
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&rows).expect("rows are plain data");
        std::fs::write(path, text + "\n").unwrap_or_else(|e| {
            eprintln!("cannot write {}: {e}", path.display());
            std::process::exit(1);
        });
    }
}

impl Args {
    /// Every combination of the fixed choices; a single one that fixes nothing if there are none.
    fn tunings(&self) -> Vec<Tuning> {
        fn each(values: &[usize]) -> Vec<Option<usize>> {
            match values {
                [] => vec![None],
                _ => values.iter().copied().map(Some).collect(),
            }
        }
        let parts = each(&self.parts);
        let of = |warps| parts.iter().map(move |&parts| Tuning { warps, parts });
        each(&self.warps).into_iter().flat_map(of).collect()
    }
}

/// `-8w-4p`: the fixed choices, as a suffix of an engine's name.
fn fixed(tuning: Tuning) -> String {
    let part = |value: Option<usize>, unit| value.map_or(String::new(), |n| format!("-{n}{unit}"));
    part(tuning.warps, 'w') + &part(tuning.parts, 'p')
}

fn engine_of(name: &str) -> Engine {
    match name {
        "portable" => Engine::Portable,
        "mma" => Engine::Mma,
        "wgmma" => Engine::Wgmma,
        _ => {
            eprintln!("no engine `{name}`");
            std::process::exit(2);
        }
    }
}

fn bench(
    client: &Client,
    workload: &'static Workload,
    args: &Args,
    roof: Option<&Roof>,
) -> Vec<Row> {
    let problem = workload.problem().expect("the table is valid");
    client.memory_cleanup().expect("the device works");
    let engine = args.engine.as_deref().map(engine_of);
    let backward_engine = args.backward_engine.as_deref().map(engine_of);
    let (mut buffers, host) =
        Buffers::new(client, problem, workload.scores, engine, backward_engine);
    let mut rows = Vec::new();
    for tuning in args.tunings() {
        buffers.tuning = tuning;
        rows.extend(bench_tuned(client, workload, &buffers, &host, args, roof));
    }
    rows
}

/// A call of the library on the buffers.
type Call = fn(&Buffers, &Client);

/// Prints how much repeats of the backward pass differ, with and without a fixed order of sums.
fn print_spread(client: &Client, workload: &Workload, buffers: &Buffers, repeats: usize) {
    let calls: [(&str, Call); 2] = [
        ("default", Buffers::backward),
        ("deterministic", Buffers::backward_deterministic),
    ];
    for (name, call) in calls {
        for line in spread(client, buffers, call, repeats) {
            println!("{:24} {name:13} {line}", workload.name);
        }
    }
}

fn bench_tuned(
    client: &Client,
    workload: &'static Workload,
    buffers: &Buffers,
    host: &Host,
    args: &Args,
    roof: Option<&Roof>,
) -> Vec<Row> {
    let problem = buffers.problem;
    let sync = || block_on(client.sync()).expect("the device works");
    sync();
    let reserved = || {
        let report = client.memory_report(cubecl::MemoryScope::Device);
        report.usage().bytes_reserved as f64
    };
    let base = reserved();

    let mut rows = Vec::new();
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let mut push = |phase, ms: Millis, host_us: Option<f64>, workspace: f64| {
        let mut row = Row {
            workload: workload.name.into(),
            phase,
            engine: match phase {
                Phase::Select | Phase::SelectRunnersUp | Phase::Lists => "portable",
                Phase::Backward
                | Phase::BackwardResidual
                | Phase::BackwardRunnersUp
                | Phase::BackwardLeaveOneOut
                | Phase::BackwardDeterministic => engine_name(buffers.backward_engine),
                _ => engine_name(buffers.engine),
            }
            .to_owned()
                + &fixed(buffers.tuning),
            ms,
            host_us,
            tflops: None,
            bytes: None,
            roof_percent: None,
            io_mib: mib(buffers.bytes() as f64),
            workspace_mib: mib(workspace),
            peak_mib: None,
            device: format!("{} ({})", client.properties().identity.name, client.name()),
            commit: args.commit.clone(),
        };
        row.complete(workload, roof);
        rows.push(row);
    };

    let wanted = |phase: Phase| {
        args.phases.is_empty() || args.phases.iter().any(|name| name == phase.name())
    };
    // The first calls of the process compile; later workloads reuse what they share.
    let start = Instant::now();
    buffers.end_to_end(client);
    if wanted(Phase::Backward) {
        buffers.backward(client);
    }
    sync();
    let cold = Millis::of(vec![start.elapsed().as_secs_f64() * 1e3]);
    let workspace = reserved() - base;
    if wanted(Phase::Cold) {
        push(Phase::Cold, cold, None, workspace);
    }
    check(client, buffers, host);
    if wanted(Phase::Backward) {
        check_gradients(client, buffers, host);
    }
    if wanted(Phase::BackwardDeterministic) {
        buffers.backward_deterministic(client);
        check_gradients(client, buffers, host);
    }
    if args.repeats > 0 {
        print_spread(client, workload, buffers, args.repeats);
    }

    let phases: [(Phase, Call); 11] = [
        (Phase::Select, Buffers::select),
        (Phase::SelectRunnersUp, Buffers::select_runners_up),
        (Phase::Lists, Buffers::lists),
        (Phase::Forward, Buffers::forward),
        (Phase::ForwardResidual, Buffers::forward_with_residual),
        (Phase::EndToEnd, Buffers::end_to_end),
        (Phase::Backward, Buffers::backward),
        (Phase::BackwardResidual, Buffers::backward_with_residual),
        (Phase::BackwardRunnersUp, Buffers::backward_with_runners_up),
        (Phase::BackwardLeaveOneOut, Buffers::backward_leaving_out),
        (
            Phase::BackwardDeterministic,
            Buffers::backward_deterministic,
        ),
    ];
    for (phase, call) in phases {
        let selects = matches!(
            phase,
            Phase::Select
                | Phase::SelectRunnersUp
                | Phase::Lists
                | Phase::BackwardRunnersUp
                | Phase::BackwardLeaveOneOut
        );
        let residual = matches!(phase, Phase::ForwardResidual | Phase::BackwardResidual);
        let absent =
            selects && !problem.has_scores || residual && problem.residual_shape().is_none();
        if !wanted(phase) || absent {
            continue;
        }
        if matches!(
            phase,
            Phase::BackwardResidual | Phase::BackwardRunnersUp | Phase::BackwardLeaveOneOut
        ) {
            buffers.forward_with_residual(client);
        }
        call(buffers, client);
        sync();
        let timed = |_| device_time(client, || call(buffers, client)).as_secs_f64() * 1e3;
        let sample = Millis::of((0..args.runs).map(timed).collect());
        // The queue is empty before each call, so no call waits for a place in it.
        let enqueued = |_| {
            sync();
            let start = Instant::now();
            call(buffers, client);
            start.elapsed().as_secs_f64() * 1e3
        };
        let host = Millis::of((0..args.runs).map(enqueued).collect());
        push(phase, sample, Some(host.median * 1e3), workspace);
    }
    rows
}
