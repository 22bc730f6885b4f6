//! The row sums of a backward pass, which either kernel of them makes.

use crate::args::Saved;
use crate::host::fill::fill;
use crate::host::scratch::{bytes, scratch};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// The row sums of a backward pass, and the rounding errors of the LSEs, each `[batch, q_heads, q_len]` in f32.
pub(crate) struct RowSums {
    pub delta: TensorBinding,
    pub lse_rest: TensorBinding,
}

/// The part that rounding the LSEs lost; zeros in a new buffer if it was not kept.
pub(crate) fn rest_or_zeros(client: &Client, problem: &Problem, saved: &Saved) -> TensorBinding {
    saved.lse_rest.clone().unwrap_or_else(|| {
        let zeros = scratch(client, problem.lse_shape());
        fill(client, &zeros, 0.0, f32::elem_type_native());
        zeros
    })
}

/// The bytes of the buffer that [`rest_or_zeros`] makes.
pub(crate) fn rest_bytes(problem: &Problem, saved: &Saved) -> usize {
    match saved.lse_rest {
        Some(_) => 0,
        None => bytes(problem.lse_shape()),
    }
}

/// The row sums' optional terms: also kernel options, which CubeCL's disk cache does not see, see `docs/upstream.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SumTerms {
    pub head_dim: usize,
    residual: bool,
    grad_lse: bool,
    boxed: bool,
    dropout: bool,
}

impl SumTerms {
    /// The terms for `saved`; with the words of the rows if there is `dropout`.
    pub(crate) fn new(head_dim: usize, saved: &Saved, boxed: bool, dropout: bool) -> Self {
        Self {
            head_dim,
            residual: saved.residual.is_some(),
            grad_lse: saved.grad_lse.is_some(),
            boxed,
            dropout,
        }
    }
}
