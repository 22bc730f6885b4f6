//! Dynamic-mask attention on slices: selection, forward and backward on the CPU, framework-free.
#![warn(missing_docs)]

mod view;

pub use flash_dma_problem::{AttentionError, AttentionOptions, ElementType, Interval, Problem};
pub use view::View;

/// Element types the engine computes on: `f32`, `half::f16`, `half::bf16`.
pub trait Element: Copy + Send + Sync + 'static {}
impl Element for f32 {}
impl Element for half::f16 {}
impl Element for half::bf16 {}

/// What the keys are selected and weighted by.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// `[batch, kv_heads, k_len]`.
    pub scores: View<'a, f32, 3>,
    /// The intervals [`select`] made of the scores, contiguous `[batch, kv_heads, k_len]`.
    pub intervals: &'a [Interval],
}

/// The inputs of attention, shaped as the problem says.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, E> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: View<'a, E, 4>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: View<'a, E, 4>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: View<'a, E, 4>,
    /// `None` for plain attention.
    pub selection: Option<Selection<'a>>,
}

/// What the backward pass needs of the forward pass, and the incoming gradients.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a, E> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub out: View<'a, E, 4>,
    /// Contiguous `[batch, q_heads, q_len]`.
    pub lse: &'a [f32],
    /// `[batch, q_heads, q_len, head_dim]`.
    pub grad_out: View<'a, E, 4>,
    /// Contiguous `[batch, q_heads, q_len]`; `None` is zero.
    pub grad_lse: Option<&'a [f32]>,
}

/// Where the backward pass writes; every slice is contiguous and overwritten.
#[derive(Debug)]
pub struct Gradients<'a, E> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: &'a mut [E],
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: &'a mut [E],
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: &'a mut [E],
    /// `[batch, kv_heads, k_len]`; given exactly if the problem has scores.
    pub scores: Option<&'a mut [f32]>,
}

/// Scores to intervals.
pub fn select(
    _scores: View<'_, f32, 3>,
    _window: usize,
    _intervals: &mut [Interval],
) -> Result<(), AttentionError> {
    todo!()
}

/// Forward.
pub fn forward<E: Element>(
    _problem: &Problem,
    _inputs: Inputs<'_, E>,
    _out: &mut [E],
    _lse: &mut [f32],
) -> Result<(), AttentionError> {
    todo!()
}

/// Backward.
pub fn backward<E: Element>(
    _problem: &Problem,
    _inputs: Inputs<'_, E>,
    _saved: Saved<'_, E>,
    _grads: Gradients<'_, E>,
) -> Result<(), AttentionError> {
    todo!()
}
