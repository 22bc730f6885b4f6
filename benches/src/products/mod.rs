//! `bench products`: the products of a training step. Every kernel that `flash-dma-kernels` and CubeK have, on the shapes
//! and layouts of `examples/train-text`, against what Burn takes without autotune.
//!
//! All candidates meet on one layer; the fastest of each kind of product then on all layers, and for gradients of weights
//! with sums in several numbers of parts. Each is compared with f64 on sampled entries before it is timed. What is refused,
//! panics or fails is a row with its reason. Rows are written as they come. A candidate that does not end ends the program,
//! and so does one that breaks the device: start again with `--skip NAME` and another file for `--json`.
//!
//! With `--rows` it times the layers of decoding steps of so many tokens instead, by the few candidates that could serve
//! them. Every launch reads another weight, as a token does: the pool of `--tokens` 32768 has 180 MB of them, more than a
//! cache holds.

mod candidates;
mod shapes;
mod sweep;
mod tensors;

use crate::Result;
use crate::options::Runtime;
use clap::Args;

/// Times products of matrices.
#[derive(Args, Debug)]
pub struct Options {
    #[command(flatten)]
    on: Runtime,
    /// Starts no candidate after this many seconds.
    #[arg(long, default_value_t = 1200)]
    seconds: u64,
    /// Ends the program if a candidate takes longer than this many seconds.
    #[arg(long, default_value_t = 90)]
    patience: u64,
    /// Tokens.
    #[arg(long, default_value_t = 32768)]
    tokens: usize,
    /// Tokens of decoding steps, which are timed in place of a training step.
    #[arg(long, value_delimiter = ',')]
    rows: Vec<usize>,
    /// One small layer, for slow devices.
    #[arg(long)]
    tiny: bool,
    /// How many of the fastest candidates run on all layers.
    #[arg(long, default_value_t = 5)]
    top: usize,
    /// Candidates whose name has one of these parts; all by default.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Candidates to leave out, by name.
    #[arg(long, value_delimiter = ',')]
    skip: Vec<String>,
}

/// Times the candidates.
pub fn run(options: &Options) -> Result {
    sweep::run(options, &options.on.client()?)
}
