//! Attention under an arbitrary mask and bias: [`plan`](plan()), [`plan_ranges`], [`masked_forward`],
//! [`masked_backward`].

mod backward;
mod forward;
mod softmax;

use crate::masked_check as check;
use crate::tile_plan::pack as plan;

pub use crate::masked_args::{BroadcastView, MaskedGradients, MaskedInputs};

use crate::{AttentionError, Element, MaskedProblem, PlanGeometry, Saved};
use flash_dma_problem::TensorName;

/// Writes the tile plan of a mask: `bits` and `counts`, contiguous and overwritten, in the layout of
/// [`PlanGeometry`]. `mask` has its shape and any strides; an element that is not 0 shows its key, or hides it
/// if `hidden`. O(1) memory beside the outputs.
///
/// # Errors
///
/// [`AttentionError::Shape`] or [`AttentionError::Buffer`]. Nothing is written then.
pub fn plan(
    geometry: &PlanGeometry,
    mask: BroadcastView<'_, u8>,
    hidden: bool,
    bits: &mut [u32],
    counts: &mut [u32],
) -> Result<(), AttentionError> {
    check::view(TensorName::Mask, &mask, &geometry.mask)?;
    crate::check::buffer(TensorName::Plan, bits, &geometry.bits_shape())?;
    crate::check::buffer(TensorName::Plan, counts, &geometry.counts_shape())?;
    plan::pack(geometry, &mask, hidden, bits);
    plan::count(geometry, bits, counts);
    Ok(())
}

/// As [`plan`](plan()), of the mask that shows query `i` the keys `first <= j < end`: views of
/// `[batch, heads, q_len | 1, 1]`, the geometry's mask with one key.
///
/// # Errors
///
/// [`AttentionError::Shape`], also if the geometry's mask has not all keys, or [`AttentionError::Buffer`]. Nothing
/// is written then.
pub fn plan_ranges(
    geometry: &PlanGeometry,
    first: BroadcastView<'_, i32>,
    end: BroadcastView<'_, i32>,
    bits: &mut [u32],
    counts: &mut [u32],
) -> Result<(), AttentionError> {
    let shape = geometry.ranges_shape()?;
    check::view(TensorName::FirstKeys, &first, &shape)?;
    check::view(TensorName::EndKeys, &end, &shape)?;
    crate::check::buffer(TensorName::Plan, bits, &geometry.bits_shape())?;
    crate::check::buffer(TensorName::Plan, counts, &geometry.counts_shape())?;
    plan::pack_ranges(geometry, [&first, &end], bits);
    plan::count(geometry, bits, counts);
    Ok(())
}

/// Attention under a mask and a bias: writes `out`, contiguous `[batch, q_heads, q_len, head_dim]`, and
/// `lse`, contiguous `[batch, q_heads, q_len]`.
///
/// The logits are `softcap(scale · q·k) + bias` for the keys that the mask and the causal masking show.
/// Blocks of 64 keys that a tile of queries does not see cost a look at their bits; those it sees whole are
/// not tested. A query that sees nothing gets zeros and an LSE of −∞.
///
/// # Errors
///
/// [`AttentionError`] if an argument does not fit the problem. Nothing is written then.
pub fn masked_forward<E: Element>(
    problem: &MaskedProblem,
    inputs: MaskedInputs<'_, E>,
    out: &mut [E],
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    check::inputs(problem, &inputs)?;
    let p = &problem.attention;
    crate::check::buffer(TensorName::Out, out, &p.q_shape())?;
    crate::check::buffer(TensorName::Lse, lse, &p.lse_shape())?;
    forward::forward(problem, &inputs, out, lse);
    Ok(())
}

/// The gradients of [`masked_forward`] for q, k, v and the bias, that of the bias in its own shape: f32 sums
/// over every axis it broadcasts, in a fixed order.
///
/// Beside the outputs the pass holds f32 gradients of the keys for at most 8 chunks of queries a head, and of
/// the bias once more (without its query axis: once a chunk).
///
/// # Errors
///
/// [`AttentionError`] if an argument does not fit the problem. Nothing is written then.
pub fn masked_backward<E: Element>(
    problem: &MaskedProblem,
    inputs: MaskedInputs<'_, E>,
    saved: Saved<'_, E>,
    grads: MaskedGradients<'_, E>,
) -> Result<(), AttentionError> {
    check::inputs(problem, &inputs)?;
    crate::check::saved(&problem.attention, &saved)?;
    check::gradients(problem, &grads)?;
    backward::backward(problem, &inputs, &saved, grads);
    Ok(())
}
