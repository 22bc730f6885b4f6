//! The tensors of the passes.

use crate::view::{BroadcastView, View};
use flash_dma_problem::Interval;

/// The scores and the keys they select.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// `[batch, kv_heads, k_len]`; the score of a key is added to its logits.
    pub scores: View<'a, f32, 3>,
    /// The intervals [`select`](crate::select()) made of the scores, contiguous
    /// `[batch, kv_heads, k_len]`, or any others that begin at their keys.
    pub intervals: &'a [Interval],
    /// `None` if nothing learns what it ranks the keys by; only the backward pass reads it.
    pub far: Option<Far<'a>>,
}

/// The pairs by which the tensor that ranks the keys learns.
#[derive(Clone, Copy, Debug)]
pub struct Far<'a> {
    /// One past the last position at which each key is a runner-up, contiguous `[batch, kv_heads, k_len]`: it is one
    /// from the end of its interval on.
    pub ends: &'a [u32],
    /// If kept keys learn what they are worth: the first position at which its rank keeps each key, contiguous
    /// `[batch, kv_heads, k_len]`; one from the end of its interval on is none.
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

/// Where the forward pass writes; every slice is contiguous and overwritten.
#[derive(Debug)]
pub struct Outputs<'a, E> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub out: &'a mut [E],
    /// As `out`: what its rounding to 16 bits loses, rounded to 16 bits, for [`Saved::residual`]; 0 where `out` is not
    /// finite. `None` does not compute it; f32 has none.
    pub residual: Option<&'a mut [E]>,
    /// `[batch, q_heads, q_len]`: the natural logarithm of each query's sum of exponentials.
    pub lse: &'a mut [f32],
    /// As `lse`: what its rounding loses, for [`Saved::lse_rest`]; 0 where `lse` is not finite. `None` does not write it.
    pub lse_rest: Option<&'a mut [f32]>,
}

impl<'a, E> Outputs<'a, E> {
    /// Without a residual and the rest of the LSE.
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
    /// As `out`: what the forward pass left beside it. `None` is zero: then the gradients of logits, and with them
    /// those of scores and biases, have the rounding of `out` in them, which adds up over the queries of a key.
    pub residual: Option<View<'a, E, 4>>,
    /// Contiguous `[batch, q_heads, q_len]`, as the forward pass wrote it.
    pub lse: &'a [f32],
    /// As `lse`: what the forward pass left beside it. `None` is zero: then every probability has the rounding of `lse`
    /// in it, a factor of up to `exp(ulp(lse) / 2)`, which is 1.00003 at 1000 and 8e13 at 1e9.
    pub lse_rest: Option<&'a [f32]>,
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
    /// `[batch, kv_heads, k_len]`: the gradient of the tensor that ranks the keys; given exactly if the selection
    /// has a [`Far`].
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

/// Where the masked backward pass writes; every slice is contiguous and overwritten.
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
