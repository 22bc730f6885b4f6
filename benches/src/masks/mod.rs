//! `bench masks`: attention under structured masks. Plan building from the mask and, if the mask is a range of keys
//! per query, from these ranges; forward and backward of the CubeCL kernels.
//!
//! Times are device times of whole calls: forward and backward are given the plan, and derive their lists of blocks
//! from it. Sampled rows of the output and of the LSE are compared with f64 first.

mod cases;
mod check;
mod device;

use crate::Result;
use crate::options::{Runtime, Selected};
use crate::stats::Millis;
use cases::{CASES, Case};
use clap::Args;
use cubecl::client::Client;
use device::Calls;
use serde::Serialize;

/// Times attention under masks.
#[derive(Args, Debug)]
pub struct Options {
    #[command(flatten)]
    on: Runtime,
    #[command(flatten)]
    selected: Selected,
    /// Divides the lengths, for slow machines.
    #[arg(long, default_value_t = 1)]
    shrink: usize,
    /// Skip the check.
    #[arg(long)]
    unchecked: bool,
}

/// One measurement.
#[derive(Serialize)]
struct Row {
    case: &'static str,
    /// Phase; those with the residual of the output are the calls of a training step.
    phase: &'static str,
    engine: &'static str,
    q_heads: usize,
    kv_heads: usize,
    len: usize,
    head_dim: usize,
    /// Fraction of visible pairs among all pairs that causal masking leaves.
    density: f64,
    /// Dropout probability of a pair, if there is dropout.
    #[serde(skip_serializing_if = "Option::is_none")]
    dropout: Option<f32>,
    ms: Millis,
    device: String,
    commit: String,
}

/// Times the cases.
pub fn run(options: &Options) -> Result {
    let client = options.on.client()?;
    let mut rows = Vec::new();
    for case in options.selected.of(CASES, |case| case.name)? {
        let len = case.len / options.shrink;
        rows.extend(bench(&client, Case { len, ..case }, options));
    }
    options.on.common.finish(&rows)
}

fn bench(client: &Client, case: Case, options: &Options) -> Vec<Row> {
    client.memory_cleanup().expect("the device works");
    let mut calls = Calls::new(client, &case);
    if options.unchecked {
        calls.prepare(client);
    } else {
        calls.check(client);
    }
    let common = &options.on.common;
    let phases = calls.phases(client).into_iter();
    let phases = phases.filter(|(phase, ..)| options.selected.phase(phase));
    let time = |(phase, engine, call): (_, _, device::Call)| {
        let time = |_| crate::device::time(client, || call(&calls, client));
        let ms = Millis::of((0..common.runs).map(time).collect());
        println!(
            "{:24} {phase:9} {engine:9} {:9.4} ms [{:.4}, {:.4}] density {:.3}",
            case.name, ms.median, ms.q1, ms.q3, calls.density
        );
        Row {
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
            device: crate::device::name(client),
            commit: common.commit.clone(),
        }
    };
    phases.map(time).collect()
}
