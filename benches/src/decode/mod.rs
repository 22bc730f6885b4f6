//! `bench decode`: decode steps and appends on one device, a row per (case, phase).
//!
//! Times are device times (events) of many calls in a row, divided by their number: of calls that the host enqueues,
//! and of a replayed graph of them. Before timing, each case is compared with the portable engine.

mod buffers;

use crate::Result;
use crate::device::{self, sync};
use crate::options::{Runtime, Selected, each};
use crate::stats::Millis;
use buffers::{DECODINGS, DecodeBuffers, Decoding};
use clap::Args;
use cubecl::client::Client;
use flash_dma_kernels::internals::DecodeTuning;
use serde::Serialize;
use std::time::Instant;

/// Times decode steps and appends of the CubeCL kernels.
#[derive(Args, Debug)]
pub struct Options {
    #[command(flatten)]
    on: Runtime,
    #[command(flatten)]
    selected: Selected,
    /// Calls of a sample.
    #[arg(long, default_value_t = 20)]
    calls: usize,
    /// Cubes that share the keys of a kv head; several are timed in turn.
    #[arg(long, value_delimiter = ',')]
    cubes: Vec<usize>,
    /// Warps, keys per tile and stages of the tensor-core kernel, as `4x16x3`; several are timed in turn.
    #[arg(long, value_delimiter = ',', value_parser = size)]
    sizes: Vec<[usize; 3]>,
    /// Skip the graph.
    #[arg(long)]
    no_graph: bool,
}

/// One measurement.
#[derive(Serialize)]
struct Row {
    /// A name of the table.
    workload: &'static str,
    /// `decode` (attention and append), or `append`.
    phase: &'static str,
    /// The engine that ran it, and its fixed choices.
    engine: String,
    /// Device time of one call, in a sequence of calls.
    ms: Millis,
    /// Device time of one call in a replayed graph; only for `decode`.
    graph_ms: Option<Millis>,
    /// Host time until a call has returned, in microseconds (median).
    host_us: f64,
    /// Number of keys that a kv head holds.
    keys: usize,
    /// Bytes of a call if every row is read or written once.
    bytes: u64,
    /// Bytes of the cache.
    cache_bytes: usize,
    /// The device and the runtime.
    device: String,
    /// The commit that was built.
    commit: String,
}

/// Times the cases.
pub fn run(options: &Options) -> Result {
    let client = options.on.client()?;
    let mut rows = Vec::new();
    for case in options.selected.of(DECODINGS, |case| case.name)? {
        rows.extend(bench(&client, case, options));
    }
    options.on.common.finish(&rows)
}

impl Options {
    /// Every combination of the fixed choices.
    fn tunings(&self) -> Vec<DecodeTuning> {
        let cubes = each(&self.cubes);
        let of = |size: Option<[usize; 3]>| {
            let [warps, key_tile, stages] = [0, 1, 2].map(|n| size.map(|size| size[n]));
            cubes.iter().map(move |&cubes| DecodeTuning {
                cubes,
                warps,
                key_tile,
                stages,
            })
        };
        each(&self.sizes).into_iter().flat_map(of).collect()
    }
}

fn size(text: &str) -> std::result::Result<[usize; 3], String> {
    let numbers: Option<Vec<usize>> = text.split('x').map(|n| n.parse().ok()).collect();
    let sizes = numbers.and_then(|n| n.try_into().ok());
    sizes.ok_or_else(|| format!("no size `{text}`"))
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

fn bench(client: &Client, case: Decoding, options: &Options) -> Vec<Row> {
    client.memory_cleanup().expect("the device works");
    let mut buffers = DecodeBuffers::new(client, case);
    let row = |phase, buffers: &DecodeBuffers, (ms, host_us), graph_ms: Option<Millis>, bytes| {
        let row = Row {
            workload: case.name,
            phase,
            engine: buffers.engine.name().to_owned() + &fixed(buffers.tuning),
            ms,
            graph_ms,
            host_us,
            keys: buffers.keys(),
            bytes,
            cache_bytes: buffers.shape.bytes(),
            device: device::name(client),
            commit: options.on.common.commit.clone(),
        };
        print(&row);
        row
    };
    let mut rows = Vec::new();
    if options.selected.phase("decode") {
        for tuning in options.tunings() {
            buffers.tuning = tuning;
            buffers.check(client);
            let calls = options.calls;
            let times = time(client, &mut buffers, options, calls, DecodeBuffers::step);
            let graph = (!options.no_graph).then(|| graph_time(client, &mut buffers, options));
            rows.push(row("decode", &buffers, times, graph, buffers.step_bytes()));
        }
        buffers.tuning = DecodeTuning::default();
    }
    if options.selected.phase("append") && case.window.is_some() {
        let times = time(client, &mut buffers, options, 4, DecodeBuffers::append);
        rows.push(row("append", &buffers, times, None, buffers.append_bytes()));
    }
    rows
}

fn print(row: &Row) {
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
}

/// Device time per call in a sequence of `calls`, and host time per call, in microseconds.
fn time(
    client: &Client,
    buffers: &mut DecodeBuffers,
    options: &Options,
    calls: usize,
    call: fn(&DecodeBuffers, &Client),
) -> (Millis, f64) {
    let mut device = Vec::new();
    let mut host = Vec::new();
    for _ in 0..=options.on.common.runs {
        buffers.rewind(client);
        sync(client);
        let all = device::time(client, || (0..calls).for_each(|_| call(buffers, client)));
        device.push(all / calls as f64);
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

/// Device time of a step in a replayed graph of `options.calls`.
fn graph_time(client: &Client, buffers: &mut DecodeBuffers, options: &Options) -> Millis {
    buffers.rewind(client);
    sync(client);
    client.graph_prepare().expect("the device has graphs");
    buffers.step(client);
    sync(client);
    client.start_capture().expect("a capture begins");
    for _ in 0..options.calls {
        buffers.step(client);
    }
    let graph = client.stop_capture().expect("nothing but launches");
    let replay = || {
        // SAFETY: the buffers live, and nothing else uses them.
        unsafe { graph.replay() }.expect("the graph runs");
    };
    let mut sample = Vec::new();
    for _ in 0..=options.on.common.runs {
        sync(client);
        sample.push(device::time(client, replay) / options.calls as f64);
    }
    Millis::of(sample.split_off(1))
}
