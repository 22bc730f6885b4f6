//! Dynamic-mask attention through CubeCL alone: selection, forward and backward, launched on plain
//! buffers and checked against the f64 oracle. No Burn.
//!
//! ```text
//! cargo run -p raw-kernels -- [cpu|cuda|wgpu] [f32|f16|bf16]
//! ```
//!
//! `cuda` and `wgpu` need the feature of the same name: `cargo run -p raw-kernels --features cuda -- cuda`.

mod check;

use check::Oracle;
use cubecl::Device;
use cubecl::client::Client;
use flash_dma_kernels::{
    AttentionError, AttentionOptions, Backward, ElementType, Forward, Gradients, Outputs, Problem,
    Saved, Selection, select,
};
use raw_kernels::{Kind, download, empty, inputs, time, upload};
use std::error::Error;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match parse(&args).and_then(|(device, element)| run(&device.client(), element)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("raw-kernels: {e}");
            ExitCode::FAILURE
        }
    }
}

fn parse(args: &[String]) -> Result<(Device, ElementType), Box<dyn Error>> {
    let device = match args.first().map_or("cpu", String::as_str) {
        "cpu" => Device::cpu()?,
        "cuda" => Device::cuda(0)?,
        "wgpu" => Device::wgpu(cubecl::device::WgpuDeviceKind::DefaultDevice)?,
        other => return Err(format!("no device {other}: cpu, cuda or wgpu").into()),
    };
    let element = match args.get(1).map_or("f32", String::as_str) {
        "f32" => ElementType::F32,
        "f16" => ElementType::F16,
        "bf16" => ElementType::Bf16,
        other => return Err(format!("no element type {other}: f32, f16 or bf16").into()),
    };
    Ok((device, element))
}

fn run(client: &Client, element: ElementType) -> Result<(), Box<dyn Error>> {
    // A problem is checked once, on the host; the functions below trust it. Four query heads share
    // two key/value heads, and every query keeps the 48 best of the keys it may see.
    let (q_shape, kv_shape) = ([1, 4, 200, 64], [1, 2, 256, 64]);
    let problem = Problem::new(
        &q_shape,
        &kv_shape,
        &kv_shape,
        Some(&kv_shape[..3]),
        element,
        &AttentionOptions::new().with_keep_window(48),
    )?;
    println!("{problem:?}\non {}\n", client.name());
    let oracle = Oracle::new(problem, 42);
    let typed = Kind::Element(element);

    // 1. Selection: two words a key say which positions attend to it. This is the whole mask.
    let inputs = inputs(client, &oracle.inputs);
    let Selection {
        scores, intervals, ..
    } = inputs.selection.clone().expect("there are scores");
    timed(client, "select", || {
        let (scores, intervals) = (scores.clone(), intervals.clone());
        select(client, scores, problem.window, intervals)
    })?;
    oracle.check_intervals(&download(client, intervals, Kind::U32))?;

    // 2. Forward: `out`, and the LSE that the backward pass needs. A plan fixes what is known before the launch: the
    //    engine and the memory that it needs.
    let out = empty(client, &problem.q_shape(), typed);
    let [lse, lse_rest] = [(); 2].map(|()| empty(client, &problem.lse_shape(), Kind::F32));
    timed(client, "forward", || {
        problem.plan_forward(client, &inputs, None)?.run(Outputs {
            lse_rest: Some(lse_rest.clone()),
            ..Outputs::new(out.clone(), lse.clone())
        })
    })?;
    oracle.check_forward(
        &download(client, out.clone(), typed),
        &download(client, lse.clone(), Kind::F32),
    )?;

    // 3. Backward: probabilities are recomputed from the LSE and its rounding error, never stored. Every gradient is
    //    overwritten, so none needs to be zeroed.
    let saved = Saved {
        out,
        residual: None,
        lse,
        lse_rest: Some(lse_rest),
        grad_out: upload(client, &oracle.grad_out, &problem.q_shape(), typed),
        grad_lse: None,
    };
    let dscores = empty(client, &problem.scores_shape(), Kind::F32);
    let grads = Gradients {
        q: empty(client, &problem.q_shape(), typed),
        k: empty(client, &problem.kv_shape(), typed),
        v: empty(client, &problem.kv_shape(), typed),
        scores: Some(dscores.clone()),
        rank: None,
    };
    timed(client, "backward", || {
        problem
            .plan_backward(client, &inputs, &saved, None)?
            .run(grads.clone())
    })?;
    oracle.check_backward([
        &download(client, grads.q, typed),
        &download(client, grads.k, typed),
        &download(client, grads.v, typed),
        &download(client, dscores, Kind::F32),
    ])?;
    println!("\nall equal to the oracle within its bounds");
    Ok(())
}

/// Launches twice and prints how long each took until the device had finished: the first one compiles.
fn timed(
    client: &Client,
    what: &str,
    launch: impl Fn() -> Result<(), AttentionError>,
) -> Result<(), Box<dyn Error>> {
    let times = time(client, 2, launch)?;
    let (first, second) = (times[0], times[1]);
    println!("{what:9} {second:10.2?} (first call, with compilation: {first:.2?})");
    Ok(())
}
