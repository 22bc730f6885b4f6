//! The passes over the queries, whatever says which keys they attend to.

pub(crate) mod backward;
pub(crate) mod bias_gradient;
mod dropout;
pub(crate) mod forward;
pub(crate) mod key_gradient;
pub(crate) mod rank;
pub(crate) mod schedule;
pub(crate) mod softmax;

use crate::keys::source::Keys;
use crate::view::View;
use flash_dma_problem::Problem;

/// The checked inputs of both passes.
pub(crate) struct Operands<'a, E, R> {
    pub(crate) problem: &'a Problem,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub(crate) q: View<'a, E, 4>,
    pub(crate) keys: Keys<'a, R>,
}
