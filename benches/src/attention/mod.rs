//! `bench attention`: selection, forward and backward pass of the CubeCL kernels on one device, a row per (workload,
//! phase).
//!
//! Times are device times (events) of whole calls: a phase includes everything its public function launches. `cold` is
//! the host's time from the first call of a process to its finished result: generating, compiling and loading every
//! kernel. Before it is timed, each workload is checked: every interval against a heap, sampled rows of the output and of
//! every gradient against f64.

mod buffers;
mod check;
mod gradients;
mod spread;

use crate::Result;
use crate::device::{self, engine_name, sync};
use crate::options::{Runtime, Selected, each};
use crate::roof::Roof;
use crate::rows::{Phase, Row};
use crate::stats::Millis;
use crate::workloads::{WORKLOADS, Workload};
use buffers::{Buffers, Call, Host};
use check::check;
use clap::{Args, ValueEnum};
use cubecl::client::Client;
use flash_dma_kernels::Engine;
use flash_dma_kernels::internals::Tuning;
use gradients::check_gradients;
use std::path::PathBuf;
use std::time::Instant;

/// Times selection, forward and backward of the CubeCL kernels.
#[derive(Args, Debug)]
pub struct Options {
    #[command(flatten)]
    on: Runtime,
    #[command(flatten)]
    selected: Selected,
    /// The forward engine; by default the one that `forward` selects.
    #[arg(long, value_enum)]
    engine: Option<EngineName>,
    /// Warps of a cube of the forward engine; several are timed one after the other.
    #[arg(long, value_delimiter = ',')]
    warps: Vec<usize>,
    /// Parts into which the forward engine splits the keys of a query tile, likewise; 1 does not split.
    #[arg(long, value_delimiter = ',')]
    parts: Vec<usize>,
    /// The backward engine, likewise.
    #[arg(long, value_enum)]
    backward_engine: Option<EngineName>,
    /// Repeat the backward pass this many times and print how far each gradient deviates from the first.
    #[arg(long, default_value_t = 0)]
    repeats: usize,
    /// The device's measured roof, as `benches/roof.py` prints it.
    #[arg(long)]
    roof: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EngineName {
    Portable,
    Mma,
    Wgmma,
}

impl From<EngineName> for Engine {
    fn from(name: EngineName) -> Self {
        match name {
            EngineName::Portable => Self::Portable,
            EngineName::Mma => Self::Mma,
            EngineName::Wgmma => Self::Wgmma,
        }
    }
}

/// Times the workloads.
pub fn run(options: &Options) -> Result {
    let client = options.on.client()?;
    let roof = options.roof.as_ref().map(|path| -> Result<Roof> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(serde_json::from_str(&text)?)
    });
    let roof = roof.transpose()?;
    let mut rows = Vec::new();
    for workload in options.selected.of(WORKLOADS, |workload| workload.name)? {
        rows.extend(bench(&client, &workload, options, roof.as_ref()));
    }
    options.on.common.write(&rows)
}

impl Options {
    /// Every combination of the fixed choices.
    fn tunings(&self) -> Vec<Tuning> {
        let parts = each(&self.parts);
        let of = |warps| parts.iter().map(move |&parts| Tuning { warps, parts });
        each(&self.warps).into_iter().flat_map(of).collect()
    }

    fn wants(&self, phase: Phase) -> bool {
        self.selected.phase(phase.name())
    }
}

/// `-8w-4p`: the fixed choices, as a suffix of an engine's name.
fn fixed(tuning: Tuning) -> String {
    let part = |value: Option<usize>, unit| value.map_or(String::new(), |n| format!("-{n}{unit}"));
    part(tuning.warps, 'w') + &part(tuning.parts, 'p')
}

fn bench(client: &Client, workload: &Workload, options: &Options, roof: Option<&Roof>) -> Vec<Row> {
    let problem = workload.problem().expect("the table is valid");
    client.memory_cleanup().expect("the device works");
    let engines = [options.engine, options.backward_engine].map(|name| name.map(Engine::from));
    let (mut buffers, host) = Buffers::new(client, problem, workload.scores, engines);
    let mut rows = Vec::new();
    for tuning in options.tunings() {
        buffers.tuning = tuning;
        rows.extend(bench_tuned(
            client, workload, &buffers, &host, options, roof,
        ));
    }
    rows
}

fn bench_tuned(
    client: &Client,
    workload: &Workload,
    buffers: &Buffers,
    host: &Host,
    options: &Options,
    roof: Option<&Roof>,
) -> Vec<Row> {
    let problem = buffers.problem;
    sync(client);
    let reserved = || {
        let report = client.memory_report(cubecl::MemoryScope::Device);
        report.usage().bytes_reserved as f64
    };
    let base = reserved();

    let mut rows = Vec::new();
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let mut push = |phase: Phase, ms: Millis, host_us: Option<f64>, workspace: f64| {
        let engine = match phase {
            Phase::Select | Phase::SelectRunnersUp | Phase::Lists => Engine::Portable,
            _ if phase.is_backward() => buffers.backward_engine,
            _ => buffers.engine,
        };
        let mut row = Row {
            workload: workload.name.into(),
            phase,
            engine: engine_name(engine).to_owned() + &fixed(buffers.tuning),
            ms,
            host_us,
            tflops: None,
            bytes: None,
            roof_percent: None,
            io_mib: mib(buffers.bytes() as f64),
            workspace_mib: mib(workspace),
            peak_mib: None,
            device: device::name(client),
            commit: options.on.common.commit.clone(),
        };
        row.complete(workload, roof);
        print(&row);
        rows.push(row);
    };

    // The first calls of the process compile; later workloads reuse what they share.
    let start = Instant::now();
    buffers.end_to_end(client);
    if options.wants(Phase::Backward) {
        buffers.backward(client);
    }
    sync(client);
    let cold = Millis::of(vec![start.elapsed().as_secs_f64() * 1e3]);
    let workspace = reserved() - base;
    if options.wants(Phase::Cold) {
        push(Phase::Cold, cold, None, workspace);
    }
    check(client, buffers, host);
    if options.wants(Phase::Backward) {
        check_gradients(client, buffers, host);
    }
    if options.wants(Phase::BackwardDeterministic) {
        buffers.backward_deterministic(client);
        check_gradients(client, buffers, host);
    }
    if options.repeats > 0 {
        let calls: [(&str, Call); 2] = [
            ("default", Buffers::backward),
            ("deterministic", Buffers::backward_deterministic),
        ];
        for (name, call) in calls {
            let what = format!("{:24} {name:13}", workload.name);
            spread::print(client, buffers, &what, call, options.repeats);
        }
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
        let residual = matches!(phase, Phase::ForwardResidual | Phase::BackwardResidual);
        let absent = phase.selects() && !problem.has_scores
            || residual && problem.residual_shape().is_none();
        if !options.wants(phase) || absent {
            continue;
        }
        if phase.is_backward() {
            buffers.forward_with_residual(client);
        }
        call(buffers, client);
        sync(client);
        let runs = options.on.common.runs;
        let timed = |_| device::time(client, || call(buffers, client));
        let sample = Millis::of((0..runs).map(timed).collect());
        // The queue is empty before each call, so no call waits for a place in it.
        let enqueued = |_| {
            sync(client);
            let start = Instant::now();
            call(buffers, client);
            start.elapsed().as_secs_f64() * 1e3
        };
        let host = Millis::of((0..runs).map(enqueued).collect());
        push(phase, sample, Some(host.median * 1e3), workspace);
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
