//! The tensors of the passes.

use crate::view::{BroadcastView, View};
use flash_dma_problem::{Interval, tensors};

/// The inputs of attention.
pub type Inputs<'a, E> =
    tensors::Inputs<View<'a, E, 4>, View<'a, f32, 3>, &'a [Interval], &'a [u32]>;

/// The scores of the keys, and the intervals that [`select`](crate::select()) made of them; those are contiguous.
pub type Selection<'a> = tensors::Selection<View<'a, f32, 3>, &'a [Interval], &'a [u32]>;

/// The pairs by which the tensor that ranks the keys learns; contiguous.
pub type RankLearning<'a> = tensors::RankLearning<&'a [u32]>;

/// The outputs of the forward pass; every slice is contiguous and overwritten.
pub type Outputs<'a, E> = tensors::Outputs<&'a mut [E], &'a mut [f32]>;

/// The results of the forward pass that the backward pass needs, and the incoming gradients.
pub type Saved<'a, E> = tensors::Saved<View<'a, E, 4>, &'a [f32]>;

/// The outputs of the backward pass; every slice is contiguous and overwritten.
pub type Gradients<'a, E> = tensors::Gradients<&'a mut [E], &'a mut [f32]>;

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
