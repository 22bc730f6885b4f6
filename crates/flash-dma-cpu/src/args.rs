//! What the passes read and write.

use crate::View;
use flash_dma_problem::Interval;

/// What the keys are selected and weighted by.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// `[batch, kv_heads, k_len]`; the score of a key is added to its logits.
    pub scores: View<'a, f32, 3>,
    /// The intervals [`select`](crate::select) made of the scores, contiguous
    /// `[batch, kv_heads, k_len]`.
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
    /// `[batch, q_heads, q_len, head_dim]`, as the forward pass wrote it.
    pub out: View<'a, E, 4>,
    /// Contiguous `[batch, q_heads, q_len]`, as the forward pass wrote it.
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
