//! `bench selections`: the selections available to a Burn user, timed through `Selector`, attention and autodiff.
//! Every round times all of them in turn, so that a device that slows down does so for all. Times are the host's,
//! from idle device to idle device, so they include everything a user waits for.

use crate::Result;
use crate::model::{Origin, clock};
use crate::options::Common;
use crate::place::Place;
use crate::stats::Millis;
use burn::tensor::{DType, Device, Distribution, Gradients, Tensor};
use burn_flash_dma::{Attention, AttentionOptions, Documents, Intervals, Selector};
use clap::Args;
use serde::Serialize;

/// Times selections, attention over them, and a training step's part of both.
#[derive(Args, Debug)]
pub struct Options {
    /// Numbers of keys.
    #[arg(long, value_delimiter = ',', default_value = "32768,131072")]
    lens: Vec<usize>,
    /// Keys that a query attends to.
    #[arg(long, default_value_t = 2048)]
    window: usize,
    /// Tokens of each document.
    #[arg(long, default_value_t = 8192)]
    document: usize,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    common: Common,
}

/// Times of one selection.
#[derive(Serialize)]
struct Row {
    selection: &'static str,
    len: usize,
    window: usize,
    /// Time to make the intervals.
    select: Millis,
    /// Forward pass over given intervals, without autodiff.
    forward: Millis,
    /// Selection, forward and backward pass under autodiff, of all inputs.
    train: Millis,
    #[serde(flatten)]
    origin: Origin,
    #[serde(flatten)]
    place: Place,
    commit: String,
}

/// The inputs of one causal layer: 32 query heads and 8 kv heads of 128 elements.
struct Inputs {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    grad_out: Tensor<4>,
}

impl Inputs {
    fn new(len: usize, place: &Place, device: &Device) -> Self {
        let normal = Distribution::Normal(0.0, 1.0);
        let options = (device, place.dtype.burn().into());
        let rows = |heads: usize| Tensor::random([1, heads, len, 128], normal, options);
        Self {
            q: rows(32),
            k: rows(8),
            v: rows(8),
            scores: Tensor::random([1, 8, len], normal, (device, DType::F32)),
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

    /// The inputs with autodiff, tracked.
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

    fn train(&self, selector: &Selector, options: AttentionOptions) -> Gradients {
        let intervals = selector.select(self.scores.clone());
        let out = self.attend(&intervals, options);
        let grads = (out * self.grad_out.clone()).sum().backward();
        assert!(self.scores.grad(&grads).is_some() && self.q.grad(&grads).is_some());
        grads
    }
}

/// Times the selections.
pub fn run(options: &Options) -> Result {
    let device = options.place.open()?;
    let mut rows = Vec::new();
    for &len in &options.lens {
        rows.extend(time(len, options, &device)?);
    }
    options.common.finish(&rows)
}

/// The rows of one length.
fn time(len: usize, options: &Options, device: &Device) -> Result<Vec<Row>> {
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
    let plain = Inputs::new(len, &options.place, device);
    let tracked = plain.tracked();
    let attention = AttentionOptions::new().with_keep_window(window);
    let mut samples = vec![[const { Vec::new() }; 3]; selectors.len()];
    // The first rounds compile.
    for round in 0..options.common.runs + 3 {
        for ((_, selector), sample) in selectors.iter().zip(&mut samples) {
            let intervals = selector.select(plain.scores.clone());
            let times = [
                clock(device, || selector.select(plain.scores.clone()))?.0,
                clock(device, || plain.attend(&intervals, attention))?.0,
                clock(device, || tracked.train(selector, attention))?.0,
            ];
            if round >= 3 {
                for (sample, time) in sample.iter_mut().zip(times) {
                    sample.push(time);
                }
            }
        }
    }
    let origin = Origin::new(&options.place, device);
    let mut rows = Vec::new();
    for ((selection, _), sample) in selectors.iter().zip(samples) {
        let [select, forward, train] = sample.map(Millis::of);
        rows.push(Row {
            selection,
            len,
            window,
            select,
            forward,
            train,
            origin: origin.clone(),
            place: options.place.clone(),
            commit: options.common.commit.clone(),
        });
    }
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
    Ok(rows)
}
