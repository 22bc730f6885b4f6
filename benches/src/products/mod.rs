//! `bench products`: the products of a training step. Every kernel of `flash-dma-kernels`, on the shapes and layouts
//! of `examples/train-text`, the choice of its rule, and that of Burn without autotune.
//!
//! Gradients of weights are timed with sums in several numbers of parts. Each candidate is compared with f64 on
//! sampled entries before it is timed. A refused or wrong one is a row with the reason. Rows are written as they
//! come.
//!
//! With `--rows` it times the layers of decoding steps of this many tokens instead, also by the kernel of a few rows.
//! Every launch reads another weight, as a token does: the pool of `--tokens` 32768 has 180 MB of them, more than a
//! cache holds.

mod shapes;
mod sweep;
mod tensors;

use crate::options::Runtime;
use clap::Args;

pub use sweep::run;

/// Times products of matrices.
#[derive(Args, Debug)]
pub struct Options {
    #[command(flatten)]
    on: Runtime,
    /// Tokens.
    #[arg(long, default_value_t = 32768)]
    tokens: usize,
    /// Tokens of decoding steps, timed instead of a training step.
    #[arg(long, value_delimiter = ',')]
    rows: Vec<usize>,
    /// One small layer, for slow devices.
    #[arg(long)]
    tiny: bool,
}
