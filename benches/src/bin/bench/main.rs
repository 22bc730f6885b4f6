//! Times the CubeCL kernels on one device and writes one row a (workload, phase).
//!
//! ```text
//! cargo run --release -p flash-dma-benches --features cuda --bin bench -- --runtime cuda
//! ```
//!
//! Times are device times (events) of whole calls: a phase includes everything its public function
//! launches. `cold` is the host's time from the first call of a process to its finished result:
//! generating, compiling and loading every kernel. Before it is timed, each workload is checked:
//! every interval against a heap, sampled rows of the output against f64.

mod buffers;
mod check;

use buffers::Buffers;
use check::check;
use clap::Parser;
use cubecl::client::Client;
use cubecl::future::block_on;
use flash_dma_benches::stats::Millis;
use flash_dma_benches::workloads::{WORKLOADS, Workload, find};
use flash_dma_kernels::Engine;
use flash_dma_problem::cost;
use serde::Serialize;
use std::time::Instant;

/// Times selection, forward and backward of the CubeCL kernels.
#[derive(Parser)]
struct Args {
    /// The runtime: cpu, cuda or wgpu, if compiled in.
    #[arg(long)]
    runtime: String,
    /// Workloads by name; all without this.
    #[arg(long, value_delimiter = ',')]
    workloads: Vec<String>,
    /// Phases by name (cold, select, forward, end-to-end, backward); all without this.
    #[arg(long, value_delimiter = ',')]
    phases: Vec<String>,
    /// Timed calls a phase.
    #[arg(long, default_value_t = 9)]
    runs: usize,
    /// The forward engine: portable or mma; by default the one that `forward` chooses.
    #[arg(long)]
    engine: Option<String>,
    /// Write the rows to this file as a JSON array.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// The commit that was built, for the rows.
    #[arg(long, default_value = option_env!("FLASH_DMA_COMMIT").unwrap_or("unknown"))]
    commit: String,
}

#[derive(Serialize)]
struct Row {
    workload: &'static str,
    phase: &'static str,
    /// The engine that serves the phase.
    engine: &'static str,
    /// Device time; host time where `phase` is `cold`.
    ms: Millis,
    /// Useful operations a second, on active pairs alone.
    tflops: Option<f64>,
    /// Bytes of the inputs and outputs together.
    io_mib: f64,
    /// Most memory the allocator held beyond inputs and outputs.
    workspace_mib: f64,
    device: String,
    commit: String,
}

fn main() {
    let args = Args::parse();
    let client = client(&args.runtime).unwrap_or_else(|| {
        eprintln!(
            "runtime `{0}` is not compiled in: build with `--features {0}`",
            args.runtime
        );
        std::process::exit(2);
    });
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
    let mut rows = Vec::new();
    for workload in chosen {
        for row in bench(&client, workload, &args) {
            println!(
                "{:24} {:10} {:8} {:10.4} ms [{:.4}, {:.4}] {:>7} TFLOP/s, io {:.0} MiB, workspace {:.0} MiB",
                row.workload,
                row.phase,
                row.engine,
                row.ms.median,
                row.ms.q1,
                row.ms.q3,
                row.tflops.map_or("-".into(), |t| format!("{t:.2}")),
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

fn client(runtime: &str) -> Option<Client> {
    let device = match runtime {
        #[cfg(feature = "cpu")]
        "cpu" => cubecl::Device::cpu(),
        #[cfg(feature = "cuda")]
        "cuda" => cubecl::Device::cuda(0),
        #[cfg(feature = "wgpu")]
        "wgpu" => cubecl::Device::wgpu(cubecl::device::WgpuDeviceKind::DefaultDevice),
        _ => return None,
    };
    Some(device.ok()?.client())
}

fn bench(client: &Client, workload: &'static Workload, args: &Args) -> Vec<Row> {
    let problem = workload.problem().expect("the table is valid");
    client.memory_cleanup().expect("the device works");
    let engine = args.engine.as_deref().map(|name| match name {
        "portable" => Engine::Portable,
        "mma" => Engine::Mma,
        "wgmma" => Engine::Wgmma,
        _ => {
            eprintln!("no engine `{name}`");
            std::process::exit(2);
        }
    });
    let (buffers, host) = Buffers::new(client, problem, engine);
    let sync = || block_on(client.sync()).expect("the device works");
    sync();
    let reserved = || {
        let report = client.memory_report(cubecl::MemoryScope::Device);
        report.usage().bytes_reserved as f64
    };
    let base = reserved();

    let mut rows = Vec::new();
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let mut push = |phase, ms: Millis, flops: Option<u128>, workspace: f64| {
        rows.push(Row {
            workload: workload.name,
            phase,
            engine: match phase {
                "select" | "backward" => "portable",
                _ => buffers.engine_name(),
            },
            ms,
            tflops: flops.map(|f| f as f64 / ms.median / 1e9),
            io_mib: mib(buffers.bytes() as f64),
            workspace_mib: mib(workspace),
            device: format!("{} ({})", client.properties().identity.name, client.name()),
            commit: args.commit.clone(),
        });
    };

    // The first calls of the process compile; later workloads reuse what they share.
    let start = Instant::now();
    let wanted = |phase: &str| args.phases.is_empty() || args.phases.iter().any(|p| p == phase);
    buffers.select(client);
    buffers.forward(client);
    if wanted("backward") {
        buffers.backward(client);
    }
    sync();
    let cold = Millis::of(vec![start.elapsed().as_secs_f64() * 1e3]);
    let workspace = reserved() - base;
    push("cold", cold, None, workspace);
    check(client, &buffers, &host);

    type Phase = (&'static str, fn(&Buffers, &Client), Option<u128>);
    let phases: [Phase; 4] = [
        ("select", Buffers::select, None),
        (
            "forward",
            Buffers::forward,
            Some(cost::forward_flops(&problem)),
        ),
        (
            "end-to-end",
            |b, c| {
                b.select(c);
                b.forward(c);
            },
            Some(cost::forward_flops(&problem)),
        ),
        (
            "backward",
            Buffers::backward,
            Some(cost::backward_flops(&problem)),
        ),
    ];
    for (name, phase, flops) in phases {
        if !wanted(name) || name == "select" && !problem.has_scores {
            continue;
        }
        phase(&buffers, client);
        sync();
        let sample = (0..args.runs)
            .map(|_| device_ms(client, || phase(&buffers, client)))
            .collect();
        push(name, Millis::of(sample), flops, workspace);
    }
    rows
}

/// Device time of the launches of `f`.
fn device_ms(client: &Client, f: impl FnOnce() + Send) -> f64 {
    let ((), duration) = client.profile(f, "phase").expect("the device can be timed");
    let ticks = block_on(duration.resolve()).expect("something was launched");
    ticks.duration().as_secs_f64() * 1e3
}
