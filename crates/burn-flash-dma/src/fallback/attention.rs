//! Dynamic-mask attention: [`DynamicMaskOps`](crate::ops::DynamicMaskOps).

use super::logits::{
    Change, Exact, Logits, attend, attend_nothing, changes, gradients, is_empty, products, rounded,
    with_residual,
};
use super::tensors::{axis_pair, bool_dtype, positions_and_keys, zeros};
use crate::ops::types::{
    AttentionGrads, Forwarded, LeftOut, OptionalFloat, RunnersUp, Saved, Selection,
};
use crate::spans::span;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, IntDType, Shape, Slice};
use flash_dma_problem::{KeptKeys, Problem};

/// See [`DynamicMaskOps::dynamic_mask_select`](crate::ops::DynamicMaskOps::dynamic_mask_select).
/// Compares every key with every other: `O(k_len^2)`.
pub fn select<B: Backend>(scores: FloatTensor<B>, kept: KeptKeys) -> IntTensor<B> {
    let _span = span!("select", engine = "default-bodies");
    let dims: [usize; 3] = scores.shape().dims();
    let [batch, heads, len] = dims;
    let device = scores.device();
    let bools = bool_dtype::<B>(&device);
    // Axis 2 holds the other key i, axis 3 the key j.
    let square = Shape::new([batch, heads, len, len]);
    let other = |t: FloatTensor<B>| {
        B::float_expand(
            B::float_reshape(t, Shape::new([batch, heads, len, 1])),
            square.clone(),
        )
    };
    let own = |t: FloatTensor<B>| {
        B::float_expand(
            B::float_reshape(t, Shape::new([batch, heads, 1, len])),
            square.clone(),
        )
    };
    let (z_i, z_j) = (other(scores.clone()), own(scores.clone()));
    let nan_i = B::float_is_nan(z_i.clone(), bools);
    let nan_j = B::float_is_nan(z_j.clone(), bools);
    let index = B::int_arange(0..len as i64, &device, IntDType::I32);
    let (i, j) = axis_pair::<B>(index.clone(), index.clone(), square.clone());
    let earlier = B::int_lower(i, j, bools);

    let greater = B::float_greater(z_i.clone(), z_j.clone(), bools);
    let equal = B::bool_or(
        B::float_equal(z_i.clone(), z_j, bools),
        B::bool_and(nan_i.clone(), nan_j.clone()),
    );
    let above_nan = B::bool_and(nan_j, B::bool_not(nan_i));
    let better = B::bool_or(B::bool_or(greater, above_nan), B::bool_and(equal, earlier));
    // A score of -inf takes no slot of any window.
    let padding = B::float_equal_elem(z_i, f32::NEG_INFINITY.into(), bools);
    let better = B::bool_and(better, B::bool_not(padding));

    // `end` is the index of the best-th better key: the number of prefixes with fewer.
    let seen = B::int_cumsum(B::bool_into_int(better, IntDType::I32), 2);
    let limit = i64::try_from(kept.best.min(len + 1)).expect("a length fits i64");
    let fewer = B::int_lower_elem(seen, limit.into(), bools);
    let end = B::int_sum_dim(B::bool_into_int(fewer, IntDType::I32), 2);
    let end = B::int_reshape(end, Shape::new(dims));

    let first = B::int_expand(
        B::int_reshape(index, Shape::new([1, 1, len])),
        Shape::new(dims),
    );
    let padding = B::float_equal_elem(scores, f32::NEG_INFINITY.into(), bools);
    let never = B::int_lower(end.clone(), first.clone(), bools);
    let end = B::int_mask_where(end, never, first.clone());
    // A key competes when it is no longer recent.
    let later = B::int_add_scalar(end, (kept.recent.min(len) as i64).into());
    let end = B::int_clamp_max(later, (len as i64).into());
    let end = B::int_mask_where(end, padding, first.clone());
    let pair = [first, end].map(|t| B::int_reshape(t, Shape::new([batch, heads, len, 1])));
    B::int_cat(pair.into(), 3)
}

/// See [`DynamicMaskOps::dynamic_mask_forward`](crate::ops::DynamicMaskOps::dynamic_mask_forward).
pub fn forward<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    selection: Selection<B>,
    problem: Problem,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let _span = span!("forward", engine = "default-bodies");
    let element: FloatDType = q.dtype().into();
    rounded::<B>(exact::<B>([q, k, v], selection, &problem), element)
}

/// See
/// [`DynamicMaskOps::dynamic_mask_forward_with_residual`](crate::ops::DynamicMaskOps::dynamic_mask_forward_with_residual).
pub fn forward_with_residual<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    selection: Selection<B>,
    problem: Problem,
) -> Forwarded<B> {
    let _span = span!("forward", engine = "default-bodies");
    let element: FloatDType = q.dtype().into();
    with_residual::<B>(exact::<B>([q, k, v], selection, &problem), element)
}

/// The results before the output is rounded.
fn exact<B: Backend>(
    [q, k, v]: [FloatTensor<B>; 3],
    selection: Selection<B>,
    problem: &Problem,
) -> Exact<B> {
    if is_empty(problem) {
        return attend_nothing::<B>(&q.device(), problem);
    }
    attend::<B>(logits::<B>(q, k, selection, problem), v, problem)
}

/// See [`DynamicMaskOps::dynamic_mask_backward`](crate::ops::DynamicMaskOps::dynamic_mask_backward).
pub fn backward<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    selection: Selection<B>,
    saved: Saved<B>,
    problem: Problem,
) -> AttentionGrads<B> {
    let _span = span!("backward", engine = "default-bodies");
    let element: FloatDType = q.dtype().into();
    let device = q.device();
    if is_empty(&problem) {
        let zeros = |shape: [usize; 4]| zeros::<B>(shape, &device, element);
        let words = || self::zeros::<B>(problem.scores_shape(), &device, FloatDType::F32);
        let has_far = matches!(
            selection,
            Selection::Scored {
                runners_up: RunnersUp::Some { .. },
                ..
            }
        );
        return AttentionGrads {
            q: zeros(problem.q_shape()),
            k: zeros(problem.kv_shape()),
            v: zeros(problem.kv_shape()),
            scores: OptionalFloat::from_option(problem.has_scores.then(words)),
            rank: OptionalFloat::from_option(has_far.then(words)),
        };
    }
    let has_scores = matches!(selection, Selection::Scored { .. });
    let (selection, rank) = match selection {
        Selection::Scored {
            scores,
            intervals,
            runners_up: RunnersUp::Some { far, left_out, .. },
        } => {
            let slices = [Slice::full(), Slice::full(), Slice::full(), (1..2).into()];
            let end = B::int_slice(intervals.clone(), &slices);
            let end = B::int_reshape(end, Shape::new(problem.scores_shape()));
            let rank = |positions, change| {
                let rows = [q.clone(), k.clone(), v.clone()];
                rank::<B>(rows, scores.clone(), (positions, change), &saved, &problem)
            };
            let mut sum = rank([end.clone(), far], Change::Added);
            if let LeftOut::Some { from, how } = left_out {
                sum = B::float_add(sum, rank([from, end], Change::LeftOut(how)));
            }
            let selection = Selection::Scored {
                scores,
                intervals,
                runners_up: RunnersUp::None,
            };
            (selection, Some(sum))
        }
        selection => (selection, None),
    };
    let logits = logits::<B>(q.clone(), k.clone(), selection, &problem);
    let ([q, k, v], grad_logits) = gradients::<B>(logits, [q, k, v], saved, &problem);
    AttentionGrads {
        q,
        k,
        v,
        scores: if has_scores {
            let sum = B::float_sum_dim(grad_logits, 2);
            OptionalFloat::Some(B::float_reshape(sum, Shape::new(problem.scores_shape())))
        } else {
            OptionalFloat::None
        },
        rank: OptionalFloat::from_option(rank),
    }
}

/// The gradient of the tensor that ranks the keys, `[batch, kv_heads, k_len]`, by a change of the keys between the first
/// position and one past the last, both `[batch, kv_heads, k_len]`.
fn rank<B: Backend>(
    [q, k, v]: [FloatTensor<B>; 3],
    scores: FloatTensor<B>,
    (positions, change): ([IntTensor<B>; 2], Change),
    saved: &Saved<B>,
    p: &Problem,
) -> FloatTensor<B> {
    let bools = bool_dtype::<B>(&q.device());
    let key = Shape::new([p.batch, p.kv_heads, p.k_len, 1]);
    let spans = positions.map(|position| B::int_reshape(position, key.clone()));
    let spans = B::int_cat(spans.into(), 3);
    let padding = B::float_equal_elem(scores.clone(), f32::NEG_INFINITY.into(), bools);
    let runners = Selection::Scored {
        scores,
        intervals: spans,
        runners_up: RunnersUp::None,
    };
    let logits = logits::<B>(q, k, runners, p);
    let changes = changes::<B>(logits, change, v, saved, p);
    let rank = B::float_sum_dim(changes, 2);
    let rank = B::float_reshape(rank, Shape::new(p.scores_shape()));
    // A key that is never attended learns nothing.
    B::float_mask_fill(rank, padding, 0.0f32.into())
}

/// The dense logits, scores added, and which of them are selected.
fn logits<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    selection: Selection<B>,
    p: &Problem,
) -> Logits<B> {
    let device = q.device();
    let bools = bool_dtype::<B>(&device);
    let (x, tanh) = products::<B>(q, k, p);
    let square = Shape::new([p.batch, p.kv_heads, p.q_len, p.k_len]);
    let (position, key) =
        positions_and_keys::<B>([p.q_len, p.k_len], p.causal, &device, square.clone());
    let visible = B::int_lower_equal(key, position.clone(), bools);
    let (logits, selected) = match selection {
        Selection::All => (x, visible),
        Selection::Scored {
            scores, intervals, ..
        } => {
            let row = Shape::new([p.batch, p.kv_heads, 1, p.k_len]);
            let bound = |index: usize| {
                let mut slices = vec![Slice::full(); 3];
                slices.push((index..index + 1).into());
                let bound = B::int_reshape(B::int_slice(intervals.clone(), &slices), row.clone());
                B::int_expand(bound, square.clone())
            };
            let inside = B::bool_and(
                B::int_lower_equal(bound(0), position.clone(), bools),
                B::int_lower(position, bound(1), bools),
            );
            let scores = B::float_reshape(scores, row.clone());
            // `first` is the key's index, so the interval implies that the key is visible.
            (B::float_add(x, scores), inside)
        }
    };
    // Every head of the group has the same mask.
    let group = Shape::new([p.batch, p.kv_heads, p.group(), p.q_len, p.k_len]);
    let selected = B::bool_reshape(
        selected,
        Shape::new([p.batch, p.kv_heads, 1, p.q_len, p.k_len]),
    );
    let selected = B::bool_reshape(B::bool_expand(selected, group), logits.shape());
    Logits {
        logits,
        selected,
        tanh,
    }
}
