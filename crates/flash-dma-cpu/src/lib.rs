//! Dynamic-mask attention on slices: selection, forward and backward on the CPU, framework-free.
//!
//! Each query attends to the `window` keys of greatest score among those it may see. [`select`] turns
//! scores into one [`Interval`] a key; [`forward`] and [`backward`] attend by those intervals in
//! O(q_len · window) time and memory linear in the lengths. Shapes, options and the checks of a
//! problem are those of [`Problem`]; buffers are slices with strides ([`View`]).
//!
//! Work runs on rayon's current thread pool. How it is cut depends on the problem alone and every sum
//! has a fixed order, so results are bit-equal over repeats and over numbers of threads.
//!
//! ```
//! use flash_dma_cpu::{AttentionOptions, ElementType, Inputs, Interval, Problem, Selection, View};
//!
//! let (q_shape, kv_shape) = ([1, 2, 4, 8], [1, 1, 4, 8]);
//! let q = vec![0.5f32; 64];
//! let kv: Vec<f32> = (0..32).map(|i| i as f32 * 0.1).collect();
//! let scores = [0.1, 0.9, -0.3, 0.4];
//!
//! let options = AttentionOptions::new().with_keep_window(2);
//! let problem = Problem::new(
//!     &q_shape, &kv_shape, &kv_shape, Some(&kv_shape[..3]), ElementType::F32, &options,
//! )?;
//! let scores = View::contiguous(&scores, [1, 1, 4]);
//! let mut intervals = [Interval { first: 0, end: 0 }; 4];
//! flash_dma_cpu::select(scores, problem.window, &mut intervals)?;
//! // Position 3 attends to the keys 1 and 3, the two of greatest score.
//! assert_eq!(intervals.map(|i| i.contains(3)), [false, true, false, true]);
//!
//! let inputs = Inputs {
//!     q: View::contiguous(&q, q_shape),
//!     k: View::contiguous(&kv, kv_shape),
//!     v: View::contiguous(&kv, kv_shape),
//!     selection: Some(Selection { scores, intervals: &intervals }),
//! };
//! let (mut out, mut lse) = (vec![0.0; 64], vec![0.0; 8]);
//! flash_dma_cpu::forward(&problem, inputs, &mut out, &mut lse)?;
//! # Ok::<(), flash_dma_cpu::AttentionError>(())
//! ```
#![warn(missing_docs)]

mod args;
mod attention;
pub mod cache;
mod check;
mod element;
mod gemm;
mod keys;
mod masked;
mod masked_args;
mod masked_check;
mod scratch;
mod select;
mod simd;
#[cfg(test)]
mod tests;
mod tile_plan;
mod view;

pub use args::{Gradients, Inputs, Saved, Selection};
pub use element::Element;
pub use flash_dma_problem::{
    AppendProblem, AttentionError, AttentionOptions, CacheShape, DecodeProblem, ElementType,
    Interval, MaskedProblem, PlanGeometry, Problem,
};
pub use masked::{
    BroadcastView, MaskedGradients, MaskedInputs, masked_backward, masked_forward, plan,
    plan_ranges,
};
pub use view::View;

use flash_dma_problem::TensorName;

/// Writes which positions attend to each key: those at which it is among the `window` keys of
/// greatest score that are visible.
///
/// `scores` is `[batch, kv_heads, k_len]`, `intervals` the same, contiguous, and overwritten. A tie
/// goes to the lower index, NaN ranks below every number, a key of score −∞ is never attended and
/// takes no place. The intervals depend on the scores and the window only
/// ([`Interval`]). O(k_len · log window) time a row; rows run in parallel.
///
/// # Errors
///
/// [`AttentionError::ZeroWindow`], [`AttentionError::Strides`], [`AttentionError::Buffer`], or
/// [`AttentionError::TooLarge`] for more than `i32::MAX` keys. Nothing is written then.
pub fn select(
    scores: View<'_, f32, 3>,
    window: usize,
    intervals: &mut [Interval],
) -> Result<(), AttentionError> {
    if window == 0 {
        return Err(AttentionError::ZeroWindow);
    }
    let [_, heads, k_len] = scores.shape;
    check::view(TensorName::Scores, &scores, &scores.shape)?;
    check::buffer(TensorName::Intervals, intervals, &scores.shape)?;
    let limit = i32::MAX as usize;
    if k_len > limit {
        return Err(AttentionError::TooLarge {
            what: "the number of keys",
            size: k_len,
            limit,
        });
    }
    let row = |row: usize| scores.row(row / heads, row % heads);
    select::select_rows(row, k_len, window, intervals);
    Ok(())
}

/// Attention: writes `out`, contiguous `[batch, q_heads, q_len, head_dim]`, and `lse`, contiguous
/// `[batch, q_heads, q_len]`: the natural logarithm of each query's sum of exponentials.
///
/// Query `i` of head `h` attends to the keys whose interval contains its
/// [position](Problem::position), with logits `softcap(scale · q·k) + score`. A query that attends to
/// nothing, or to logits of −∞ only, gets zeros and an LSE of −∞. Arithmetic is f32.
///
/// # Errors
///
/// [`AttentionError`] if an argument does not fit the problem or its own shape. Nothing is written
/// then.
pub fn forward<E: Element>(
    problem: &Problem,
    inputs: Inputs<'_, E>,
    out: &mut [E],
    lse: &mut [f32],
) -> Result<(), AttentionError> {
    check::inputs(problem, &inputs)?;
    check::buffer(TensorName::Out, out, &problem.q_shape())?;
    check::buffer(TensorName::Lse, lse, &problem.lse_shape())?;
    attention::forward::forward(problem, &inputs.q, &inputs, out, lse);
    Ok(())
}

/// The gradients of [`forward`] for q, k, v and the scores; the selection is a constant.
///
/// `grads.k`, `grads.v` and `grads.scores` sum over the query heads of a group. A query that attends
/// to nothing and a key that nothing attends to have gradients of exactly 0, whatever they hold.
/// Beside the outputs the pass holds f32 gradients of the keys that each of at most 8 chunks of
/// queries a head touches: memory linear in the lengths.
///
/// # Errors
///
/// [`AttentionError`] if an argument does not fit the problem or its own shape. Nothing is written
/// then.
pub fn backward<E: Element>(
    problem: &Problem,
    inputs: Inputs<'_, E>,
    saved: Saved<'_, E>,
    grads: Gradients<'_, E>,
) -> Result<(), AttentionError> {
    check::inputs(problem, &inputs)?;
    check::saved(problem, &saved)?;
    check::gradients(problem, &grads)?;
    attention::backward::backward(problem, &inputs, &saved, grads);
    Ok(())
}
