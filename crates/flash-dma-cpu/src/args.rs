//! The tensors of the passes.

use crate::view::{BroadcastView, View};
use flash_dma_problem::Interval;

/// The scores and the keys they select.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// `[batch, kv_heads, k_len]`; the score of a key is added to its logits.
    pub scores: View<'a, f32, 3>,
    /// The intervals that [`select`](crate::select()) made from the scores, contiguous `[batch, kv_heads, k_len]`, or
    /// any others that begin at their keys.
    pub intervals: &'a [Interval],
    /// The pairs that train the rank; `None` if nothing learns it. Only the backward pass reads it.
    pub far: Option<Far<'a>>,
}

/// The pairs that train the tensor by which keys are ranked.
#[derive(Clone, Copy, Debug)]
pub struct Far<'a> {
    /// One past the last position at which each key is a runner-up, which it is from the end of its interval on:
    /// contiguous `[batch, kv_heads, k_len]`.
    pub ends: &'a [u32],
    /// The first position at which each key is kept for its rank; a position from the end of the key's interval on
    /// means that it never is. Contiguous `[batch, kv_heads, k_len]`. `None` unless kept keys learn.
    pub left_out: Option<&'a [u32]>,
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

/// The outputs of the forward pass; every slice is contiguous and overwritten.
#[derive(Debug)]
pub struct Outputs<'a, E> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub out: &'a mut [E],
    /// The rounding error of `out`, rounded to 16 bits, for [`Saved::residual`]; shape of `out`, 0 where `out` is not
    /// finite. `None` does not compute it; f32 has none.
    pub residual: Option<&'a mut [E]>,
    /// `[batch, q_heads, q_len]`: the natural logarithm of each query's sum of exponentials.
    pub lse: &'a mut [f32],
    /// The rounding error of `lse`, for [`Saved::lse_rest`]; shape of `lse`, 0 where not finite. `None` skips it.
    pub lse_rest: Option<&'a mut [f32]>,
}

impl<'a, E> Outputs<'a, E> {
    /// The outputs without the residual and the rest of the LSE.
    #[must_use]
    pub fn new(out: &'a mut [E], lse: &'a mut [f32]) -> Self {
        Self {
            out,
            residual: None,
            lse,
            lse_rest: None,
        }
    }
}

/// The results of the forward pass that the backward pass needs, and the incoming gradients.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a, E> {
    /// `[batch, q_heads, q_len, head_dim]`, as the forward pass wrote it.
    pub out: View<'a, E, 4>,
    /// The residual that the forward pass wrote, shaped as `out`. `None` is zero: then the gradients of logits, and
    /// with them those of scores and biases, include the rounding of `out`, which adds up over the queries of a key.
    pub residual: Option<View<'a, E, 4>>,
    /// Contiguous `[batch, q_heads, q_len]`, as the forward pass wrote it.
    pub lse: &'a [f32],
    /// The rounding error of `lse` that the forward pass wrote, shaped as `lse`. `None` is zero: then every probability
    /// includes the rounding of `lse`, a factor of up to `exp(ulp(lse) / 2)`, which is 1.00003 at 1000 and 8e13 at 1e9.
    pub lse_rest: Option<&'a [f32]>,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub grad_out: View<'a, E, 4>,
    /// Contiguous `[batch, q_heads, q_len]`; `None` is zero.
    pub grad_lse: Option<&'a [f32]>,
}

/// The outputs of the backward pass; every slice is contiguous and overwritten.
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
    /// `[batch, kv_heads, k_len]`: the gradient of the rank; given exactly if the selection has a [`Far`].
    pub rank: Option<&'a mut [f32]>,
}

/// The inputs of attention under a mask and a bias, shaped as the problem says.
#[derive(Clone, Copy, Debug)]
pub struct MaskedInputs<'a, E> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: View<'a, E, 4>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: View<'a, E, 4>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: View<'a, E, 4>,
    /// The bits of the mask's tile plan, contiguous; given exactly if the problem has a plan.
    pub bits: Option<&'a [u32]>,
    /// Added to the logits after the softcap; given exactly if the problem has a bias.
    pub bias: Option<BroadcastView<'a, f32>>,
}

/// The outputs of the masked backward pass; every slice is contiguous and overwritten.
#[derive(Debug)]
pub struct MaskedGradients<'a, E> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: &'a mut [E],
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: &'a mut [E],
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: &'a mut [E],
    /// In the bias's own shape, if there is a bias; `None` does not compute it.
    pub bias: Option<&'a mut [f32]>,
}
