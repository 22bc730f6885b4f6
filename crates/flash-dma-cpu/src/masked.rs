//! Attention under any mask and bias: [`plan`](plan()), [`plan_ranges`], [`masked_forward`], [`masked_backward`].

use crate::args::{MaskedGradients, MaskedInputs, Outputs, Saved};
use crate::attention::backward::{Targets, backward as differentiate};
use crate::attention::bias_gradient::BiasGradient;
use crate::attention::forward::forward as attend;
use crate::check;
use crate::element::Element;
use crate::keys::operands::Operands;
use crate::tile_plan::{count, pack, pack_ranges};
use crate::view::BroadcastView;
use flash_dma_problem::{AttentionError, MaskedProblem, PlanGeometry, TensorName};

/// Writes the tile plan of a mask: `bits` and `counts`, contiguous and overwritten, in the layout of [`PlanGeometry`].
/// `mask` has its shape and any strides; a nonzero element shows its key, or hides it if `hidden`. O(1) memory.
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
    check::broadcast_view(TensorName::Mask, &mask, &geometry.mask)?;
    check::plan(geometry, bits, counts)?;
    pack(geometry, &mask, hidden, bits);
    count(geometry, bits, counts);
    Ok(())
}

/// Writes the tile plan of the mask that shows query `i` the keys `first <= j < end`: views of
/// `[batch, heads, q_len | 1, 1]`, the geometry's mask with one key.
///
/// # Errors
///
/// [`AttentionError::Shape`] (also if the geometry's mask lacks keys) or [`AttentionError::Buffer`]. Nothing is written
/// then.
pub fn plan_ranges(
    geometry: &PlanGeometry,
    first: BroadcastView<'_, i32>,
    end: BroadcastView<'_, i32>,
    bits: &mut [u32],
    counts: &mut [u32],
) -> Result<(), AttentionError> {
    let shape = geometry.ranges_shape()?;
    check::broadcast_view(TensorName::FirstKeys, &first, &shape)?;
    check::broadcast_view(TensorName::EndKeys, &end, &shape)?;
    check::plan(geometry, bits, counts)?;
    pack_ranges(geometry, &first, &end, bits);
    count(geometry, bits, counts);
    Ok(())
}

/// Attention under a mask and a bias: writes the [`Outputs`].
///
/// The logits are `softcap(scale · q·k) + bias` for the keys that the mask and the causal masking show. For blocks of
/// 64 keys that a tile of queries does not see, only the bits are read; blocks that it sees completely are not tested.
/// A query that sees nothing gets zeros and an LSE of −∞.
///
/// # Errors
///
/// [`AttentionError`] if an argument does not fit the problem. Nothing is written then.
pub fn masked_forward<E: Element>(
    problem: &MaskedProblem,
    inputs: MaskedInputs<'_, E>,
    outputs: Outputs<'_, E>,
) -> Result<(), AttentionError> {
    check::masked_inputs(problem, &inputs)?;
    check::outputs(&problem.attention, &outputs)?;
    attend(&Operands::masked(problem, &inputs), outputs);
    Ok(())
}

/// The gradients of [`masked_forward`] for q, k, v and the bias. The gradient of the bias has the bias's own shape: f32
/// sums over every axis it broadcasts, in a fixed order. For a bias that all keys share it is a sum of `grad_lse`, see
/// [`MaskedProblem::has_row_bias`].
///
/// In addition to the outputs the pass holds f32 gradients of the keys for at most 8 chunks of queries per head, and
/// one copy of the gradient of the bias (without its query axis: one per chunk).
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
    check::masked_inputs(problem, &inputs)?;
    check::saved(&problem.attention, &saved)?;
    check::masked_gradients(problem, &grads)?;
    let bias = match (grads.bias, problem.bias) {
        (Some(grad), Some(shape)) => BiasGradient::Bias {
            grad,
            shape,
            heads_each: problem.heads_each(shape[1]),
            of_rows: problem.has_row_bias(),
        },
        _ => BiasGradient::Ignored,
    };
    let targets = Targets {
        q: grads.q,
        k: grads.k,
        v: grads.v,
        bias,
    };
    differentiate(&Operands::masked(problem, &inputs), &saved, targets);
    Ok(())
}
