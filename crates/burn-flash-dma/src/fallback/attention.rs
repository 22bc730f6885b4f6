//! The operations in plain Burn operations: for backends without an engine, and a third opinion in
//! the tests. `O(q_len * k_len)` memory and time; everything is computed in f32.

use crate::ops::{AttentionGrads, OptionalFloat, Saved, Selection};
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{BoolDType, FloatDType, IntDType, Shape};
use flash_dma_problem::Problem;

/// See [`DynamicMaskOps::dynamic_mask_select`](crate::ops::DynamicMaskOps::dynamic_mask_select).
/// Compares every key with every other: `O(k_len^2)`.
pub fn select<B: Backend>(scores: FloatTensor<B>, window: usize) -> IntTensor<B> {
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

    // `end` is the index of the window-th better key: the number of prefixes with fewer.
    let seen = B::int_cumsum(B::bool_into_int(better, IntDType::I32), 2);
    let limit = i64::try_from(window.min(len + 1)).expect("a length fits i64");
    let fewer = B::int_lower_elem(seen, limit.into(), bools);
    let end = B::int_sum_dim(B::bool_into_int(fewer, IntDType::I32), 2);
    let end = B::int_reshape(end, Shape::new(dims));

    let first = B::int_expand(
        B::int_reshape(index, Shape::new([1, 1, len])),
        Shape::new(dims),
    );
    let padding = B::float_equal_elem(scores, f32::NEG_INFINITY.into(), bools);
    let dead = B::bool_or(padding, B::int_lower(end.clone(), first.clone(), bools));
    let end = B::int_mask_where(end, dead, first.clone());
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
    let element: FloatDType = q.dtype().into();
    let device = q.device();
    if problem.k_len == 0 || problem.q_len == 0 || problem.batch == 0 {
        let lse = B::float_full(
            Shape::new(problem.lse_shape()),
            f32::NEG_INFINITY.into(),
            &device,
            FloatDType::F32,
        );
        return (zeros::<B>(problem.q_shape(), &device, element), lse);
    }
    let logits = Logits::<B>::selected(q, k, selection, &problem);
    attend::<B>(logits, v, element, &problem)
}

/// The output, of type `element`, and the LSE of logits.
pub(crate) fn attend<B: Backend>(
    logits: Logits<B>,
    v: FloatTensor<B>,
    element: FloatDType,
    problem: &Problem,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let bools = bool_dtype::<B>(&v.device());
    let rows = logits.row_shape();
    let masked = B::float_mask_fill(
        logits.logits,
        B::bool_not(logits.selected.clone()),
        f32::NEG_INFINITY.into(),
    );
    let max = B::float_max_dim(masked.clone(), 3);
    // A row that attends to nothing has no maximum to subtract.
    let none = B::float_equal_elem(max.clone(), f32::NEG_INFINITY.into(), bools);
    let max = B::float_mask_fill(max, none, 0.0f32.into());
    let p = B::float_exp(B::float_sub(masked, max.clone()));
    // A NaN maximum makes every exponential NaN, those of unselected keys included.
    let p = B::float_mask_fill(p, B::bool_not(logits.selected.clone()), 0.0f32.into());
    let l = B::float_sum_dim(p.clone(), 3);
    let lse = B::float_add(max, B::float_log(l.clone()));

    let v = to_f32::<B>(v);
    let sum = masked_matmul::<B>(p, logits.selected, v);
    let empty = B::float_equal_elem(l.clone(), 0.0f32.into(), bools);
    let out = B::float_div(sum, l);
    let empty = B::bool_expand(empty, out.shape());
    let out = B::float_mask_fill(out, empty, 0.0f32.into());
    debug_assert_eq!(lse.shape(), rows);
    (
        B::float_cast(
            B::float_reshape(out, Shape::new(problem.q_shape())),
            element,
        ),
        B::float_reshape(lse, Shape::new(problem.lse_shape())),
    )
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
    let element: FloatDType = q.dtype().into();
    let device = q.device();
    if problem.k_len == 0 || problem.q_len == 0 || problem.batch == 0 {
        let zeros = |shape: [usize; 4]| zeros::<B>(shape, &device, element);
        return AttentionGrads {
            q: zeros(problem.q_shape()),
            k: zeros(problem.kv_shape()),
            v: zeros(problem.kv_shape()),
            scores: match selection {
                Selection::All => OptionalFloat::None,
                Selection::Scored { .. } => OptionalFloat::Some(self::zeros::<B>(
                    problem.scores_shape(),
                    &device,
                    FloatDType::F32,
                )),
            },
        };
    }
    let has_scores = matches!(selection, Selection::Scored { .. });
    let logits = Logits::<B>::selected(q.clone(), k.clone(), selection, &problem);
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
    }
}

/// The gradients of q, k, v, in the type of q, and those of the logits, shaped as [`Logits`].
pub(crate) fn gradients<B: Backend>(
    logits: Logits<B>,
    [q, k, v]: [FloatTensor<B>; 3],
    saved: Saved<B>,
    problem: &Problem,
) -> ([FloatTensor<B>; 3], FloatTensor<B>) {
    let element: FloatDType = q.dtype().into();
    let bools = bool_dtype::<B>(&q.device());
    let rows = logits.row_shape();
    let pairs = logits.logits.shape();
    let grouped = |t| grouped::<B>(to_f32::<B>(t), problem);
    let (q, out, grad_out) = (grouped(q), grouped(saved.out), grouped(saved.grad_out));
    let (k, v) = (to_f32::<B>(k), to_f32::<B>(v));
    let lse = B::float_reshape(saved.lse, rows.clone());

    // A row whose weights are all zero has no gradient.
    let empty = B::float_equal_elem(lse.clone(), f32::NEG_INFINITY.into(), bools);
    let alive = B::bool_expand(B::bool_not(empty), pairs);
    let selected = B::bool_and(logits.selected, alive);
    let unselected = B::bool_not(selected.clone());
    let keep = |t| B::float_mask_fill(t, unselected.clone(), 0.0f32.into());

    let p = keep(B::float_exp(B::float_sub(logits.logits, lse)));
    let dp = B::float_matmul(grad_out.clone(), B::float_transpose(v));
    let mut delta = B::float_sum_dim(B::float_mul(grad_out.clone(), out), 3);
    if let OptionalFloat::Some(grad_lse) = saved.grad_lse {
        delta = B::float_sub(delta, B::float_reshape(grad_lse, rows));
    }
    let ds = keep(B::float_mul(p.clone(), B::float_sub(dp, delta)));
    let grad_logits = ds.clone();
    let ds = match logits.tanh {
        None => ds,
        Some(tanh) => {
            let slope = B::float_add_scalar(
                B::float_neg(B::float_mul(tanh.clone(), tanh)),
                1.0f32.into(),
            );
            keep(B::float_mul(ds, slope))
        }
    };
    let ds = B::float_mul_scalar(ds, problem.scale.into());

    let selected_t = B::bool_swap_dims(selected.clone(), 2, 3);
    let grad_q = masked_matmul::<B>(ds.clone(), selected, k);
    let grad_k = masked_matmul::<B>(B::float_transpose(ds), selected_t.clone(), q);
    let grad_v = masked_matmul::<B>(B::float_transpose(p), selected_t, grad_out);
    let finish = |t, shape| B::float_cast(B::float_reshape(t, Shape::new(shape)), element);
    let grads = [
        finish(grad_q, problem.q_shape()),
        finish(grad_k, problem.kv_shape()),
        finish(grad_v, problem.kv_shape()),
    ];
    (grads, grad_logits)
}

/// The dense logits of a problem, `[batch, kv_heads, group * q_len, k_len]`: the query heads of a
/// group are rows of their key/value head.
pub(crate) struct Logits<B: Backend> {
    pub(crate) logits: FloatTensor<B>,
    /// Whether the query attends to the key.
    pub(crate) selected: BoolTensor<B>,
    /// `tanh` of the scaled product over the cap.
    pub(crate) tanh: Option<FloatTensor<B>>,
}

impl<B: Backend> Logits<B> {
    fn selected(
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        selection: Selection<B>,
        p: &Problem,
    ) -> Self {
        let device = q.device();
        let bools = bool_dtype::<B>(&device);
        let (x, tanh) = products::<B>(q, k, p);
        let square = Shape::new([p.batch, p.kv_heads, p.q_len, p.k_len]);
        let (position, key) =
            positions_and_keys::<B>([p.q_len, p.k_len], p.causal, &device, square.clone());
        let visible = B::int_lower_equal(key, position.clone(), bools);
        let (logits, selected) = match selection {
            Selection::All => (x, visible),
            Selection::Scored { scores, intervals } => {
                let row = Shape::new([p.batch, p.kv_heads, 1, p.k_len]);
                let bound = |index: usize| {
                    let mut slices = vec![burn::tensor::Slice::full(); 3];
                    slices.push((index..index + 1).into());
                    let bound =
                        B::int_reshape(B::int_slice(intervals.clone(), &slices), row.clone());
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
        Self {
            logits,
            selected,
            tanh,
        }
    }

    /// One value a query.
    fn row_shape(&self) -> Shape {
        let [batch, heads, rows, _] = self.logits.shape().dims();
        Shape::new([batch, heads, rows, 1])
    }
}

/// The scaled, and maybe capped, products `[batch, kv_heads, group * q_len, k_len]`, and with a cap their `tanh`.
pub(crate) fn products<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    p: &Problem,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let q = grouped::<B>(to_f32::<B>(q), p);
    let k = to_f32::<B>(k);
    let x = B::float_mul_scalar(B::float_matmul(q, B::float_transpose(k)), p.scale.into());
    match p.softcap {
        None => (x, None),
        Some(cap) => {
            let tanh = B::float_tanh(B::float_div_scalar(x, cap.into()));
            (B::float_mul_scalar(tanh.clone(), cap.into()), Some(tanh))
        }
    }
}

/// The position of each row and the index of each column, as tensors of a shape of four axes.
pub(crate) fn positions_and_keys<B: Backend>(
    [q_len, k_len]: [usize; 2],
    causal: bool,
    device: &B::Device,
    shape: Shape,
) -> (IntTensor<B>, IntTensor<B>) {
    let positions = B::int_arange(0..q_len as i64, device, IntDType::I32);
    let positions = if causal {
        let shift = k_len as i64 - q_len as i64;
        B::int_add_scalar(positions, shift.into())
    } else {
        B::int_full(
            Shape::new([q_len]),
            (k_len as i64 - 1).into(),
            device,
            IntDType::I32,
        )
    };
    let keys = B::int_arange(0..k_len as i64, device, IntDType::I32);
    axis_pair::<B>(positions, keys, shape)
}

/// `weights . values` over the selected pairs only.
///
/// The weights of the other pairs are zero, but `0 * NaN` is NaN, and what an unselected row holds
/// must not be seen. So the product is taken over the finite values, and what the others contribute
/// is worked out from counts: an infinity of the sign of its product, or NaN where signs meet, the
/// weight is zero, or the value is NaN.
fn masked_matmul<B: Backend>(
    weights: FloatTensor<B>,
    selected: BoolTensor<B>,
    values: FloatTensor<B>,
) -> FloatTensor<B> {
    let bools = bool_dtype::<B>(&values.device());
    let float = |t| B::bool_into_float(t, FloatDType::F32);
    let infinity = f32::INFINITY;
    let plus = B::float_equal_elem(values.clone(), infinity.into(), bools);
    let minus = B::float_equal_elem(values.clone(), (-infinity).into(), bools);
    let infinite = B::bool_or(plus.clone(), minus.clone());
    let unusual = B::bool_or(infinite.clone(), B::float_is_nan(values.clone(), bools));
    let finite = B::float_mask_fill(values, unusual.clone(), 0.0f32.into());
    let product = B::float_matmul(weights.clone(), finite);

    let positive = float(B::float_greater_elem(weights.clone(), 0.0f32.into(), bools));
    let negative = float(B::float_lower_elem(weights, 0.0f32.into(), bools));
    let signs = B::float_sub(positive.clone(), negative.clone());
    let nonzero = B::float_add(positive, negative);
    let met = B::float_matmul(float(selected), float(unusual));
    let infinities = B::float_matmul(nonzero, float(infinite));
    let balance = B::float_matmul(signs, B::float_sub(float(plus), float(minus)));

    let any_plus = B::float_greater_elem(
        B::float_add(infinities.clone(), balance.clone()),
        0.0f32.into(),
        bools,
    );
    let any_minus = B::float_greater_elem(
        B::float_sub(infinities.clone(), balance),
        0.0f32.into(),
        bools,
    );
    let undefined = B::bool_or(
        B::float_greater(met, infinities, bools),
        B::bool_and(any_plus.clone(), any_minus.clone()),
    );
    // A weight of NaN has made the product NaN already, which an infinity must not hide.
    let undefined = B::bool_or(undefined, B::float_is_nan(product.clone(), bools));
    let product = B::float_mask_fill(product, any_plus, infinity.into());
    let product = B::float_mask_fill(product, any_minus, (-infinity).into());
    B::float_mask_fill(product, undefined, f32::NAN.into())
}

/// `[batch, q_heads, q_len, head_dim]` to `[batch, kv_heads, group * q_len, head_dim]`.
fn grouped<B: Backend>(tensor: FloatTensor<B>, p: &Problem) -> FloatTensor<B> {
    let shape = [p.batch, p.kv_heads, p.group() * p.q_len, p.head_dim];
    B::float_reshape(tensor, Shape::new(shape))
}

/// Two index vectors as the rows and the columns of a `[batch, heads, rows, columns]` tensor.
fn axis_pair<B: Backend>(
    rows: IntTensor<B>,
    columns: IntTensor<B>,
    shape: Shape,
) -> (IntTensor<B>, IntTensor<B>) {
    let [_, _, height, width] = shape.dims();
    let rows = B::int_reshape(rows, Shape::new([1, 1, height, 1]));
    let columns = B::int_reshape(columns, Shape::new([1, 1, 1, width]));
    (
        B::int_expand(rows, shape.clone()),
        B::int_expand(columns, shape),
    )
}

pub(crate) fn to_f32<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    B::float_cast(tensor, FloatDType::F32)
}

pub(crate) fn zeros<B: Backend>(
    shape: impl Into<Shape>,
    device: &B::Device,
    dtype: FloatDType,
) -> FloatTensor<B> {
    B::float_zeros(shape.into(), device, dtype)
}

pub(crate) fn bool_dtype<B: Backend>(device: &B::Device) -> BoolDType {
    get_or_init_device_settings::<B>(device).bool_dtype
}
