//! The operations as functions on `Tensor`: validation, then one dispatch.

use super::selection::{Intervals, try_select};
use super::zoh::try_zoh_scores;
use crate::ops::attention::DynamicMaskOps;
use crate::ops::types::Selection;
use crate::validate::{expect, rows_element, same_device, scores_as_f32, supported};
use burn::backend::Dispatch;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use flash_dma_problem::{AttentionError, AttentionOptions, Problem, TensorName};

/// Dynamic-mask attention: every query attends to the `options.keep_window` keys of greatest score
/// among those it may see, and each logit gets its key's score.
///
/// `out_i = sum_j softmax_j(softcap(scale * q_i . k_j) + scores_j) v_j` over the selected keys `j`.
///
/// | tensor | shape | type |
/// |---|---|---|
/// | `q`, result | `[batch, q_heads, q_len, head_dim]` | f32, f16 or bf16 |
/// | `k`, `v` | `[batch, kv_heads, k_len, head_dim]` | as `q` |
/// | `scores` | `[batch, kv_heads, k_len]` | f32 (f16 and bf16 are cast up) |
///
/// Differentiable in `q`, `k`, `v` and `scores`, whichever are tracked; the selection itself is a
/// constant. Strided inputs (`[batch, len, heads, head_dim]` data through a `swap_dims`) are read in
/// place. A score of −∞ hides its key (padding); a query that sees nothing gets zeros.
///
/// # Panics
///
/// Where [`try_dynamic_mask_attention`] returns an error, with its text.
#[must_use]
pub fn dynamic_mask_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    options: AttentionOptions,
) -> Tensor<4> {
    expect(try_dynamic_mask_attention(q, k, v, scores, options))
}

/// As [`dynamic_mask_attention`].
///
/// # Errors
///
/// [`AttentionError`] if the shapes, element types, devices or options do not fit; nothing is
/// computed then.
pub fn try_dynamic_mask_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    Call::new(q, k, v, Some(scores), options)?.out(None)
}

/// As [`dynamic_mask_attention`], with the LSE of the logits beside the output: `[batch, q_heads,
/// q_len]`, f32, natural logarithm, −∞ where nothing is attended. Both are differentiable.
///
/// # Panics
///
/// Where [`try_dynamic_mask_attention_with_lse`] returns an error, with its text.
#[must_use]
pub fn dynamic_mask_attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    options: AttentionOptions,
) -> (Tensor<4>, Tensor<3>) {
    expect(try_dynamic_mask_attention_with_lse(
        q, k, v, scores, options,
    ))
}

/// As [`dynamic_mask_attention_with_lse`].
///
/// # Errors
///
/// As [`try_dynamic_mask_attention`].
pub fn try_dynamic_mask_attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    Call::new(q, k, v, Some(scores), options)?.out_and_lse()
}

/// As [`dynamic_mask_attention`] with a selection made before by [`select`](crate::select()), from
/// these or other scores: several calls may share one. `options.keep_window` must be `None` or the
/// window of the intervals.
///
/// # Panics
///
/// Where [`try_dynamic_mask_attention_with_intervals`] returns an error, with its text.
#[must_use]
pub fn dynamic_mask_attention_with_intervals(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    intervals: &Intervals,
    options: AttentionOptions,
) -> Tensor<4> {
    expect(try_dynamic_mask_attention_with_intervals(
        q, k, v, scores, intervals, options,
    ))
}

/// As [`dynamic_mask_attention_with_intervals`].
///
/// # Errors
///
/// As [`try_dynamic_mask_attention`]; further if the intervals have another shape, device or window.
pub fn try_dynamic_mask_attention_with_intervals(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scores: Tensor<3>,
    intervals: &Intervals,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let options = intervals.resolve_window(options)?;
    let call = Call::new(q, k, v, Some(scores), options)?;
    intervals.check(&call.problem, &call.q.device())?;
    call.out(Some(intervals))
}

/// Plain attention without scores: every visible key is attended. Shapes, types, strides and
/// gradients as in [`dynamic_mask_attention`]; `options.keep_window` must be `None`.
///
/// # Panics
///
/// Where [`try_attention`] returns an error, with its text.
#[must_use]
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: AttentionOptions) -> Tensor<4> {
    expect(try_attention(q, k, v, options))
}

/// As [`attention`].
///
/// # Errors
///
/// As [`try_dynamic_mask_attention`].
pub fn try_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    Call::new(q, k, v, None, options)?.out(None)
}

/// As [`attention`], with the LSE as in [`dynamic_mask_attention_with_lse`].
///
/// # Panics
///
/// Where [`try_attention_with_lse`] returns an error, with its text.
#[must_use]
pub fn attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: AttentionOptions,
) -> (Tensor<4>, Tensor<3>) {
    expect(try_attention_with_lse(q, k, v, options))
}

/// As [`attention_with_lse`].
///
/// # Errors
///
/// As [`try_dynamic_mask_attention`].
pub fn try_attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    Call::new(q, k, v, None, options)?.out_and_lse()
}

/// Dynamic-mask attention from its learned parameters: [`zoh_scores`](crate::zoh_scores()) of `v`,
/// then [`dynamic_mask_attention`]. `v` has two gradient paths.
///
/// `dt_proj` is `[kv_heads, kv_heads * head_dim]`, `a` `[kv_heads]`.
///
/// # Panics
///
/// Where [`try_flash_dma_attention`] returns an error, with its text.
#[must_use]
pub fn flash_dma_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    dt_proj: Tensor<2>,
    a: Tensor<1>,
    options: AttentionOptions,
) -> Tensor<4> {
    expect(try_flash_dma_attention(q, k, v, dt_proj, a, options))
}

/// As [`flash_dma_attention`].
///
/// # Errors
///
/// As [`try_dynamic_mask_attention`] and [`try_zoh_scores`](crate::try_zoh_scores()).
pub fn try_flash_dma_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    dt_proj: Tensor<2>,
    a: Tensor<1>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let scores = try_zoh_scores(v.clone(), dt_proj, a)?;
    try_dynamic_mask_attention(q, k, v, scores, options)
}

/// A validated call.
struct Call {
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    /// f32, and present exactly if the problem has scores.
    scores: Option<Tensor<3>>,
    problem: Problem,
}

impl Call {
    fn new(
        q: Tensor<4>,
        k: Tensor<4>,
        v: Tensor<4>,
        scores: Option<Tensor<3>>,
        options: AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let rows = [q, k, v];
        let element = rows_element(&rows)?;
        let scores_shape = scores.as_ref().map(Tensor::dims);
        let problem = Problem::new(
            &rows[0].dims(),
            &rows[1].dims(),
            &rows[2].dims(),
            scores_shape.as_ref().map(<[usize; 3]>::as_slice),
            element,
            &options,
        )?;
        let device = supported(&rows, element)?;
        if let Some(scores) = &scores {
            same_device(&device, TensorName::Scores, scores.device())?;
        }
        let scores = scores.map(scores_as_f32).transpose()?;
        let [q, k, v] = rows;
        Ok(Self {
            q,
            k,
            v,
            scores,
            problem,
        })
    }

    fn run(
        self,
        intervals: Option<&Intervals>,
        operation: Operation,
    ) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        let selection = match self.scores {
            None => Selection::<Dispatch>::All,
            Some(scores) => {
                let intervals = match intervals {
                    Some(intervals) => intervals.clone(),
                    None => try_select(scores.clone(), self.problem.window)?,
                };
                Selection::Scored {
                    scores: scores.into_dispatch(),
                    intervals: intervals.into_tensor().into_dispatch(),
                }
            }
        };
        let (out, lse) = operation(
            self.q.into_dispatch(),
            self.k.into_dispatch(),
            self.v.into_dispatch(),
            selection,
            self.problem,
        );
        Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
    }

    fn out(self, intervals: Option<&Intervals>) -> Result<Tensor<4>, AttentionError> {
        let (out, _) = self.run(intervals, Dispatch::dynamic_mask_forward)?;
        Ok(out)
    }

    fn out_and_lse(self) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        self.run(None, Dispatch::dynamic_mask_forward_with_lse)
    }
}

/// One of the two forward operations.
type Operation = fn(
    FloatTensor<Dispatch>,
    FloatTensor<Dispatch>,
    FloatTensor<Dispatch>,
    Selection<Dispatch>,
    Problem,
) -> (FloatTensor<Dispatch>, FloatTensor<Dispatch>);
