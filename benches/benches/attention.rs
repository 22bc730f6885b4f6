//! Selection and forward pass in Criterion, timed by the device's events.
//!
//! ```text
//! cargo bench -p flash-dma-benches --no-default-features --features cuda
//! ```
//!
//! `FLASH_DMA_RUNTIME` chooses among the compiled runtimes: cuda, wgpu or cpu. On the CPU only the smallest
//! workload of each kind is timed.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use cubecl::client::Client;
use flash_dma_benches::buffers::{Buffers, client, device_time, engine_name};
use flash_dma_benches::workloads::{WORKLOADS, Workload};
use std::time::Duration;

/// The requested runtime, otherwise the first available one.
fn device() -> Client {
    let asked = std::env::var("FLASH_DMA_RUNTIME");
    let names: Vec<&str> = match &asked {
        Ok(name) => vec![name],
        Err(_) => vec!["cuda", "wgpu", "cpu"],
    };
    let found = names.iter().find_map(|name| client(name));
    found.unwrap_or_else(|| panic!("none of {names:?} is compiled in and has a device"))
}

/// Calls between two events: reading the events takes longer than a short call.
const CALLS: u64 = 32;

/// Times one call on each of the workloads.
fn group(
    criterion: &mut Criterion,
    name: &str,
    wanted: impl Fn(&Workload) -> bool,
    call: fn(&Buffers, &Client),
) {
    let client = device();
    // A CPU would take hours for the sizes of a GPU.
    let count = if client.name() == "cpu" {
        1
    } else {
        usize::MAX
    };
    let mut group = criterion.benchmark_group(name);
    group.sample_size(10);
    group.warm_up_time(Duration::from_millis(500));
    for workload in WORKLOADS.iter().filter(|w| wanted(w)).take(count) {
        let problem = workload.problem().expect("the table is valid");
        let (buffers, _) = Buffers::new(&client, problem, workload.scores, None, None);
        // The forward pass reads what the selection wrote.
        buffers.select(&client);
        let id = BenchmarkId::new(engine_name(buffers.engine), workload.name);
        group.bench_function(id, |bencher| {
            bencher.iter_custom(|calls| {
                let full = (0..calls / CALLS).map(|_| CALLS);
                full.chain([calls % CALLS])
                    .filter(|&calls| calls > 0)
                    .map(|calls| {
                        device_time(&client, || (0..calls).for_each(|_| call(&buffers, &client)))
                    })
                    .sum()
            });
        });
    }
    group.finish();
}

fn select(criterion: &mut Criterion) {
    group(criterion, "select", |w| w.window.is_some(), Buffers::select);
}

fn forward(criterion: &mut Criterion) {
    group(
        criterion,
        "forward-dense",
        |w| w.window.is_none(),
        Buffers::forward,
    );
    group(
        criterion,
        "forward-sparse",
        |w| w.window.is_some(),
        Buffers::forward,
    );
    group(
        criterion,
        "end-to-end",
        |w| w.window.is_some(),
        Buffers::end_to_end,
    );
}

criterion_group!(benches, select, forward);
criterion_main!(benches);
