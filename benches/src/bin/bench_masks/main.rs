//! Times attention under structured masks: plan building from the mask and, where the mask is a range of keys per
//! query, from these ranges; forward and backward of the CubeCL kernels.
//!
//! ```text
//! cargo run --release -p flash-dma-benches --features cuda --bin bench-masks -- --runtime cuda
//! ```
//!
//! Times are device times of whole calls: forward and backward are given the plan, and derive their lists of blocks
//! from it. Sampled rows of the output and of the LSE are compared with f64 first.

mod cases;
mod device;

use cases::{CASES, Case};
use clap::Parser;
use device::Calls;
use flash_dma_benches::buffers::client_or_exit;
use flash_dma_benches::stats::Millis;
use serde::Serialize;

/// Times attention under masks.
#[derive(Parser)]
struct Args {
    /// The runtime: cpu, cuda or wgpu, if compiled in.
    #[arg(long)]
    runtime: String,
    /// Cases by name; all of them by default.
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Phases by name (plan, plan-ranges, forward, forward-residual, backward, backward-residual); all of them by
    /// default. Those with the residual of the output are the calls of a training step.
    #[arg(long, value_delimiter = ',')]
    phases: Vec<String>,
    /// Timed calls per phase.
    #[arg(long, default_value_t = 9)]
    runs: usize,
    /// Divides the lengths, for slow machines.
    #[arg(long, default_value_t = 1)]
    shrink: usize,
    /// Skip the check.
    #[arg(long)]
    unchecked: bool,
    /// Write the rows to this file as a JSON array.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// The commit that was built, for the rows.
    #[arg(long, default_value = option_env!("FLASH_DMA_COMMIT").unwrap_or("unknown"))]
    commit: String,
}

/// One measurement.
#[derive(Serialize)]
struct Row {
    case: &'static str,
    phase: &'static str,
    engine: &'static str,
    q_heads: usize,
    kv_heads: usize,
    len: usize,
    head_dim: usize,
    /// The fraction of visible pairs among all pairs that causal masking leaves.
    density: f64,
    /// The probability that a pair is dropped, if there is dropout.
    #[serde(skip_serializing_if = "Option::is_none")]
    dropout: Option<f32>,
    ms: Millis,
    device: String,
    commit: String,
}

fn main() {
    let args = Args::parse();
    let client = client_or_exit(&args.runtime);
    let chosen: Vec<Case> = (CASES.iter())
        .filter(|case| args.cases.is_empty() || args.cases.iter().any(|name| name == case.name))
        .map(|case| Case {
            len: case.len / args.shrink,
            ..*case
        })
        .collect();
    let mut rows = Vec::new();
    for case in chosen {
        client.memory_cleanup().expect("the device works");
        let mut calls = Calls::new(&client, &case);
        if args.unchecked {
            calls.prepare(&client);
        } else {
            calls.check(&client);
        }
        for (phase, engine, call) in calls.phases(&client) {
            if !args.phases.is_empty() && !args.phases.iter().any(|name| name == phase) {
                continue;
            }
            let ms = Millis::of(
                (0..args.runs)
                    .map(|_| device::time(&client, &calls, call))
                    .collect(),
            );
            println!(
                "{:24} {:9} {:9} {:9.4} ms [{:.4}, {:.4}] density {:.3}",
                case.name, phase, engine, ms.median, ms.q1, ms.q3, calls.density
            );
            rows.push(Row {
                case: case.name,
                phase,
                engine,
                q_heads: case.q_heads,
                kv_heads: case.kv_heads,
                len: case.len,
                head_dim: case.head_dim,
                density: calls.density,
                dropout: case.dropout,
                ms,
                device: format!("{} ({})", client.properties().identity.name, client.name()),
                commit: args.commit.clone(),
            });
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
