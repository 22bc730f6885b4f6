//! The selections that a Burn user may make, timed through `Selector`, attention and autodiff on CUDA: every round
//! times all of them in turn, so that a device that grows slow grows so for all. Times are the host's, from a device
//! that is idle to one that is again, so they have all that a user waits for.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_flash_dma::{Attention, AttentionOptions, Documents, Intervals, Selector};
use clap::Parser;
use flash_dma_benches::stats::Millis;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

/// Times selections, attention over them, and a training step's part of both.
#[derive(Parser)]
struct Options {
    /// The numbers of keys.
    #[arg(long, value_delimiter = ',', default_value = "32768,131072")]
    lens: Vec<usize>,
    /// Keys that a query attends to.
    #[arg(long, default_value_t = 2048)]
    window: usize,
    /// The tokens of each document.
    #[arg(long, default_value_t = 8192)]
    document: usize,
    /// Rounds.
    #[arg(long, default_value_t = 15)]
    runs: usize,
    /// A file for the rows.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Times of one selection.
#[derive(Serialize)]
struct Row {
    selection: &'static str,
    len: usize,
    window: usize,
    /// Making the intervals.
    select: Millis,
    /// The forward pass over given intervals, without autodiff.
    forward: Millis,
    /// Selection, forward and backward pass under autodiff, of all inputs.
    train: Millis,
}

/// The inputs of one causal layer: 32 query heads and 8 kv heads of 128 elements, bf16.
struct Inputs {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    grad_out: Tensor<4>,
}

impl Inputs {
    fn new(len: usize, device: &Device) -> Self {
        let rows = |heads: usize| {
            let normal = Distribution::Normal(0.0, 1.0);
            Tensor::random([1, heads, len, 128], normal, (device, DType::BF16))
        };
        Self {
            q: rows(32),
            k: rows(8),
            v: rows(8),
            scores: Tensor::random(
                [1, 8, len],
                Distribution::Normal(0.0, 1.0),
                (device, DType::F32),
            ),
            grad_out: rows(32),
        }
    }

    fn attend(&self, intervals: &Intervals, options: AttentionOptions) -> Tensor<4> {
        Attention::new(self.q.clone(), self.k.clone(), self.v.clone())
            .scores(self.scores.clone())
            .intervals(intervals)
            .options(options)
            .forward()
    }

    /// The same with autodiff, tracked.
    fn tracked(&self) -> Self {
        let rows = |x: &Tensor<4>| x.clone().autodiff().require_grad();
        Self {
            q: rows(&self.q),
            k: rows(&self.k),
            v: rows(&self.v),
            scores: self.scores.clone().autodiff().require_grad(),
            grad_out: self.grad_out.clone().autodiff(),
        }
    }

    fn train(&self, selector: &Selector, options: AttentionOptions) {
        let intervals = selector.select(self.scores.clone());
        let out = self.attend(&intervals, options);
        let grads = (out * self.grad_out.clone()).sum().backward();
        assert!(self.scores.grad(&grads).is_some() && self.q.grad(&grads).is_some());
    }
}

fn main() {
    let options = Options::parse();
    let device = Device::cuda(0);
    let mut rows = Vec::new();
    for &len in &options.lens {
        rows.extend(time(len, &options, &device));
    }
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&rows).expect("rows are plain");
        std::fs::write(path, text).expect("the file for the rows can be written");
    }
}

/// The rows of one length.
fn time(len: usize, options: &Options, device: &Device) -> Vec<Row> {
    let window = options.window;
    let documents = Documents::from_lengths([vec![options.document; len / options.document]]);
    let top = || Selector::top(window);
    let selectors = [
        ("top", top()),
        ("recent 128", top().recent(128)),
        ("recent 128, sinks 4", top().recent(128).sinks(4)),
        ("documents", top().documents(documents)),
        ("runners-up w/4", top().runners_up(window / 4)),
    ];
    let plain = Inputs::new(len, device);
    let tracked = plain.tracked();
    let attention = AttentionOptions::new().with_keep_window(window);
    let mut samples = vec![[const { Vec::new() }; 3]; selectors.len()];
    // The first rounds compile.
    for round in 0..options.runs + 3 {
        for ((_, selector), sample) in selectors.iter().zip(&mut samples) {
            let intervals = selector.select(plain.scores.clone());
            let times = [
                clock(device, || drop(selector.select(plain.scores.clone()))),
                clock(device, || drop(plain.attend(&intervals, attention))),
                clock(device, || tracked.train(selector, attention)),
            ];
            if round >= 3 {
                for (sample, time) in sample.iter_mut().zip(times) {
                    sample.push(time);
                }
            }
        }
    }
    let rows: Vec<Row> = (selectors.iter().zip(samples))
        .map(|((selection, _), sample)| {
            let [select, forward, train] = sample.map(Millis::of);
            Row {
                selection,
                len,
                window,
                select,
                forward,
                train,
            }
        })
        .collect();
    for row in &rows {
        println!(
            "{:>7} {:<20} select {:.3}  forward {:.3}  train {:.3} ms, {:.3} of the first",
            row.len,
            row.selection,
            row.select.median,
            row.forward.median,
            row.train.median,
            row.train.median / rows[0].train.median,
        );
    }
    rows
}

/// Milliseconds of a call on an idle device until it is idle again.
fn clock(device: &Device, call: impl FnOnce()) -> f64 {
    device.sync().expect("no earlier call failed");
    let start = Instant::now();
    call();
    device.sync().expect("the call ran");
    start.elapsed().as_secs_f64() * 1e3
}
