//! The inputs of both passes.

use crate::keys::source::Keys;
use crate::view::View;
use flash_dma_problem::Problem;

/// The checked inputs of attention.
pub(crate) struct Operands<'a, E, R> {
    pub(crate) problem: &'a Problem,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub(crate) q: View<'a, E, 4>,
    pub(crate) keys: Keys<'a, R>,
}
