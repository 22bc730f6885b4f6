//! `bench attention`: selection, forward and backward pass of the CubeCL kernels on one device, a row per (workload,
//! phase).
//!
//! Times are device times (events) of whole calls: a phase includes everything its public function launches. `cold`
//! is the host's time from the first call of a process to its finished result: generating, compiling and loading
//! every kernel. Before timing, each workload is checked: every interval against a heap, sampled rows of the output
//! and of every gradient against f64.

mod buffers;
mod check;
mod roof;
mod row;
mod spread;
mod workloads;

use crate::Result;
use crate::device::{self, sync};
use crate::options::{Runtime, Selected, each};
use crate::stats::Millis;

use buffers::Buffers;
use check::{check_forward, check_gradients};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use cubecl::client::Client;
use flash_dma_kernels::Engine;
use flash_dma_kernels::internals::Tuning;
use roof::Roof;
use row::{Phase, Row};
use std::time::Instant;
use workloads::{WORKLOADS, Workload};

/// Times selection, forward and backward of the CubeCL kernels.
#[derive(Args, Debug)]
pub struct Options {
    #[command(flatten)]
    on: Runtime,
    #[command(flatten)]
    selected: Selected,
    /// The forward engine; by default the one that `forward` selects.
    #[arg(long, value_parser = engines())]
    engine: Option<Engine>,
    /// Warps of a cube of the forward engine; several are timed in turn.
    #[arg(long, value_delimiter = ',')]
    warps: Vec<usize>,
    /// Parts into which the forward engine splits the keys of a query tile; several are timed in turn; 1 does not
    /// split.
    #[arg(long, value_delimiter = ',')]
    parts: Vec<usize>,
    /// The backward engine; by default the one that `backward` selects.
    #[arg(long, value_parser = engines())]
    backward_engine: Option<Engine>,
    /// Repeat the backward pass this many times and print how far each gradient deviates from the first.
    #[arg(long, default_value_t = 0)]
    repeats: usize,
    /// A file with the device's measured roof, as printed by `benches/roof.py`.
    #[arg(long, value_parser = Roof::read)]
    roof: Option<Roof>,
}

/// The engines of the kernels, by name.
fn engines() -> impl TypedValueParser<Value = Engine> {
    let all = [Engine::Portable, Engine::Mma, Engine::Wgmma];
    PossibleValuesParser::new(all.map(Engine::name)).map(move |name| {
        let named = all.into_iter().find(|engine| engine.name() == name);
        named.expect("a possible value")
    })
}

/// Times the workloads.
pub fn run(options: &Options) -> Result {
    let client = options.on.client()?;
    let mut rows = Vec::new();
    for workload in options.selected.of(WORKLOADS, |workload| workload.name)? {
        rows.extend(bench(&client, &workload, options));
    }
    options.on.common.finish(&rows)
}

impl Options {
    /// Every combination of the fixed choices.
    fn tunings(&self) -> Vec<Tuning> {
        let parts = each(&self.parts);
        let of = |warps| parts.iter().map(move |&parts| Tuning { warps, parts });
        each(&self.warps).into_iter().flat_map(of).collect()
    }

    fn wants(&self, phase: Phase) -> bool {
        self.selected.phase(&phase.name())
    }
}

/// `-8w-4p`: the fixed choices, as a suffix of an engine's name.
fn fixed(tuning: Tuning) -> String {
    let part = |value: Option<usize>, unit| value.map_or(String::new(), |n| format!("-{n}{unit}"));
    part(tuning.warps, 'w') + &part(tuning.parts, 'p')
}

fn bench(client: &Client, workload: &Workload, options: &Options) -> Vec<Row> {
    let problem = workload.problem().expect("the table is valid");
    client.memory_cleanup().expect("the device works");
    let engines = [options.engine, options.backward_engine];
    let mut buffers = Buffers::new(client, problem, workload.scores, engines);
    let mut rows = Vec::new();
    for tuning in options.tunings() {
        buffers.tuning = tuning;
        rows.extend(bench_tuned(client, workload, &buffers, options));
    }
    rows
}

fn bench_tuned(
    client: &Client,
    workload: &Workload,
    buffers: &Buffers,
    options: &Options,
) -> Vec<Row> {
    let (problem, common) = (&buffers.problem, &options.on.common);
    sync(client);
    let reserved = || {
        let report = client.memory_report(cubecl::MemoryScope::Device);
        report.usage().bytes_reserved as f64
    };
    let base = reserved();

    // The first calls of the process compile; later workloads reuse what they share.
    let start = Instant::now();
    buffers.launch(client, Phase::EndToEnd);
    if options.wants(Phase::Backward) {
        buffers.launch(client, Phase::Backward);
    }
    sync(client);
    let cold = Millis::of(vec![start.elapsed().as_secs_f64() * 1e3]);
    let workspace = reserved() - base;

    let mut rows = Vec::new();
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let mut push = |phase: Phase, ms: Millis, host_us: Option<f64>| {
        let engine = match phase {
            Phase::Select | Phase::SelectRunnersUp | Phase::Lists => Engine::Portable,
            _ if phase.is_backward() => buffers.backward_engine,
            _ => buffers.engine,
        };
        let (flops, bytes) = phase.cost(problem);
        let least = (options.roof.as_ref())
            .zip(bytes)
            .map(|(roof, bytes)| roof.ms(problem.element, flops.unwrap_or(0) as f64, bytes as f64));
        let [io_mib, workspace_mib] = [buffers.bytes() as f64, workspace].map(mib);
        let row = Row {
            workload: workload.name,
            phase,
            engine: engine.name().to_owned() + &fixed(buffers.tuning),
            ms,
            host_us,
            tflops: flops.map(|flops| flops as f64 / ms.median / 1e9),
            bytes: bytes.and_then(|bytes| u64::try_from(bytes).ok()),
            roof_percent: least.map(|least| 100.0 * least / ms.median),
            io_mib,
            workspace_mib,
            peak_mib: io_mib + workspace_mib,
            device: device::name(client),
            commit: common.commit.clone(),
        };
        print(&row);
        rows.push(row);
    };
    if options.wants(Phase::Cold) {
        push(Phase::Cold, cold, None);
    }
    check_forward(client, buffers);
    if options.wants(Phase::Backward) {
        check_gradients(client, buffers);
    }
    if options.wants(Phase::BackwardDeterministic) {
        buffers.launch(client, Phase::BackwardDeterministic);
        check_gradients(client, buffers);
    }
    if options.repeats > 0 {
        for (name, phase) in [
            ("default", Phase::Backward),
            ("deterministic", Phase::BackwardDeterministic),
        ] {
            let what = format!("{:24} {name:13}", workload.name);
            spread::print(client, buffers, &what, phase, options.repeats);
        }
    }

    for &phase in Phase::value_variants() {
        if phase == Phase::Cold || phase.is_absent(problem) || !options.wants(phase) {
            continue;
        }
        if phase.is_backward() {
            buffers.launch(client, Phase::ForwardResidual);
        }
        let call = || buffers.launch(client, phase);
        call();
        sync(client);
        let timed = |_| device::time(client, call);
        let sample = Millis::of((0..common.runs).map(timed).collect());
        // The queue is empty before each call, so no call waits for room in it.
        let enqueued = |_| {
            sync(client);
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64() * 1e3
        };
        let host = Millis::of((0..common.runs).map(enqueued).collect());
        push(phase, sample, Some(host.median * 1e3));
    }
    rows
}

fn print(row: &Row) {
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
}
