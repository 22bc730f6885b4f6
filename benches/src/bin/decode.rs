//! Times decode steps and appends on one device and writes one row per (case, phase).
//!
//! ```text
//! cargo run --release -p flash-dma-benches --features cuda --bin decode -- --runtime cuda
//! ```
//!
//! Times are device times (events) of many calls in a row, divided by their number: of calls that the host enqueues,
//! and of a replayed graph of them. Before it is timed, each case is compared with the portable engine.

use clap::Parser;
use cubecl::client::Client;
use cubecl::future::block_on;
use flash_dma_benches::buffers::{client, device_time, engine_name};
use flash_dma_benches::decoding::{DECODINGS, DecodeBuffers, Decoding};
use flash_dma_benches::rows::DecodeRow;
use flash_dma_benches::stats::Millis;
use flash_dma_kernels::internals::DecodeTuning;
use std::time::Instant;

/// Times decode steps and appends of the CubeCL kernels.
#[derive(Parser)]
struct Args {
    /// The runtime: cpu, cuda or wgpu, if compiled in.
    #[arg(long)]
    runtime: String,
    /// Cases by name; all of them by default.
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Phases by name (decode, append); both by default.
    #[arg(long, value_delimiter = ',')]
    phases: Vec<String>,
    /// Timed samples per phase.
    #[arg(long, default_value_t = 9)]
    runs: usize,
    /// Calls of a sample.
    #[arg(long, default_value_t = 20)]
    calls: usize,
    /// Cubes that share the keys of a kv head; several are timed one after the other.
    #[arg(long, value_delimiter = ',')]
    cubes: Vec<usize>,
    /// Warps, keys per tile and stages of the tensor-core kernel, as `4x16x3`; several likewise.
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<String>,
    /// Skip the graph.
    #[arg(long)]
    no_graph: bool,
    /// Write the rows to this file as a JSON array.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// The commit that was built, for the rows.
    #[arg(long, default_value = option_env!("FLASH_DMA_COMMIT").unwrap_or("unknown"))]
    commit: String,
}

fn main() {
    let args = Args::parse();
    let client = client(&args.runtime).unwrap_or_else(|| fail("the runtime is not compiled in"));
    let mut rows = Vec::new();
    for case in DECODINGS {
        if args.cases.is_empty() || args.cases.iter().any(|name| name == case.name) {
            rows.extend(bench(&client, *case, &args));
        }
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&rows).expect("rows are plain data");
        if let Err(e) = std::fs::write(path, text + "\n") {
            fail(&format!("cannot write {}: {e}", path.display()));
        }
    }
}

fn fail(why: &str) -> ! {
    eprintln!("{why}");
    std::process::exit(2);
}

impl Args {
    /// Every combination of the fixed choices; a single one that fixes nothing if there are none.
    fn tunings(&self) -> Vec<DecodeTuning> {
        let sizes: Vec<[Option<usize>; 3]> = match &self.sizes[..] {
            [] => vec![[None; 3]],
            sizes => sizes.iter().map(|text| size(text).map(Some)).collect(),
        };
        let cubes: Vec<Option<usize>> = match &self.cubes[..] {
            [] => vec![None],
            cubes => cubes.iter().copied().map(Some).collect(),
        };
        let each = |[warps, key_tile, stages]: [Option<usize>; 3]| {
            cubes.iter().map(move |&cubes| DecodeTuning {
                cubes,
                warps,
                key_tile,
                stages,
            })
        };
        sizes.into_iter().flat_map(each).collect()
    }

    fn wants(&self, phase: &str) -> bool {
        self.phases.is_empty() || self.phases.iter().any(|name| name == phase)
    }
}

fn size(text: &str) -> [usize; 3] {
    let numbers: Option<Vec<usize>> = text.split('x').map(|n| n.parse().ok()).collect();
    numbers
        .and_then(|n| n.try_into().ok())
        .unwrap_or_else(|| fail(&format!("no size `{text}`")))
}

/// `-8c-4x16x3`: the fixed choices, as a suffix of an engine's name.
fn fixed(tuning: DecodeTuning) -> String {
    let cubes = tuning.cubes.map_or(String::new(), |n| format!("-{n}c"));
    let size = [tuning.warps, tuning.key_tile, tuning.stages].map(|n| n.map(|n| n.to_string()));
    match size {
        [Some(w), Some(k), Some(s)] => format!("{cubes}-{w}x{k}x{s}"),
        _ => cubes,
    }
}

fn bench(client: &Client, case: Decoding, args: &Args) -> Vec<DecodeRow> {
    client.memory_cleanup().expect("the device works");
    let mut buffers = DecodeBuffers::new(client, case);
    let mut rows = Vec::new();
    let mut push = |phase: &str,
                    buffers: &DecodeBuffers,
                    ms: Millis,
                    graph: Option<Millis>,
                    host_us,
                    bytes: u64| {
        let row = DecodeRow {
            workload: case.name.into(),
            phase: String::from(phase),
            engine: engine_name(buffers.engine).to_owned() + &fixed(buffers.tuning),
            ms,
            graph_ms: graph,
            host_us,
            keys: buffers.keys(),
            bytes,
            cache_bytes: buffers.shape.bytes(),
            device: format!("{} ({})", client.properties().identity.name, client.name()),
            commit: args.commit.clone(),
        };
        println!(
            "{:24} {:6} {:16} {:8.2} us [{:.2}, {:.2}], graph {:8.2} us, host {:5.1} us, {:6.0} GB/s, cache {:.1} MiB",
            row.workload,
            row.phase,
            row.engine,
            row.ms.median * 1e3,
            row.ms.q1 * 1e3,
            row.ms.q3 * 1e3,
            row.graph_ms.map_or(f64::NAN, |g| g.median * 1e3),
            row.host_us,
            row.bytes as f64 / row.graph_ms.map_or(row.ms.median, |g| g.median) / 1e6,
            row.cache_bytes as f64 / f64::from(1 << 20),
        );
        rows.push(row);
    };
    if args.wants("decode") {
        for tuning in args.tunings() {
            buffers.tuning = tuning;
            buffers.check(client);
            let (ms, host) = time(client, &mut buffers, args, args.calls, DecodeBuffers::step);
            let graph = (!args.no_graph).then(|| graph_time(client, &mut buffers, args));
            let bytes = buffers.step_bytes();
            push("decode", &buffers, ms, graph, host, bytes);
        }
        buffers.tuning = DecodeTuning::default();
    }
    if args.wants("append") && case.window.is_some() {
        let (ms, host) = time(client, &mut buffers, args, 4, DecodeBuffers::append);
        let bytes = buffers.append_bytes();
        push("append", &buffers, ms, None, host, bytes);
    }
    rows
}

fn sync(client: &Client) {
    block_on(client.sync()).expect("the device works");
}

/// Device time per call in a sequence of `calls`, and host time per call, in microseconds.
fn time(
    client: &Client,
    buffers: &mut DecodeBuffers,
    args: &Args,
    calls: usize,
    call: fn(&DecodeBuffers, &Client),
) -> (Millis, f64) {
    let mut device = Vec::new();
    let mut host = Vec::new();
    for _ in 0..=args.runs {
        buffers.rewind(client);
        sync(client);
        let all = device_time(client, || (0..calls).for_each(|_| call(buffers, client)));
        device.push(all.as_secs_f64() * 1e3 / calls as f64);
        buffers.rewind(client);
        sync(client);
        let start = Instant::now();
        call(buffers, client);
        host.push(start.elapsed().as_secs_f64() * 1e3);
        sync(client);
    }
    // The first sample of each is the warm-up.
    let (device, host) = (device.split_off(1), host.split_off(1));
    (Millis::of(device), Millis::of(host).median * 1e3)
}

/// Device time of a step in a replayed graph of `args.calls`.
fn graph_time(client: &Client, buffers: &mut DecodeBuffers, args: &Args) -> Millis {
    buffers.rewind(client);
    sync(client);
    client.graph_prepare().expect("the device has graphs");
    buffers.step(client);
    sync(client);
    client.start_capture().expect("a capture begins");
    for _ in 0..args.calls {
        buffers.step(client);
    }
    let graph = client.stop_capture().expect("nothing but launches");
    let replay = || {
        // SAFETY: the buffers live, and nothing else uses them.
        unsafe { graph.replay() }.expect("the graph runs");
    };
    let mut sample = Vec::new();
    for _ in 0..=args.runs {
        sync(client);
        let all = device_time(client, replay);
        sample.push(all.as_secs_f64() * 1e3 / args.calls as f64);
    }
    Millis::of(sample.split_off(1))
}
