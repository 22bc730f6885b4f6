//! Dense logits, and the outputs, LSE and gradients that both attention operations compute from them.

use super::alibi;
use super::dropout::dropped;
use super::tensors::{bool_dtype, to_f32, zeros};
use crate::ops::types::{Forwarded, OptionalFloat, Saved};
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};
use flash_dma_problem::{LeaveOneOut, Problem};

/// The results of attention before the output is rounded.
pub(crate) struct Exact<B: Backend> {
    /// `[batch, q_heads, q_len, head_dim]`, f32.
    pub(crate) out: FloatTensor<B>,
    pub(crate) lse: Lse<B>,
}

/// An LSE in two parts.
pub(crate) struct Lse<B: Backend> {
    pub(crate) lse: FloatTensor<B>,
    /// What the rounding of the LSE lost; 0 where it is not finite.
    pub(crate) rest: FloatTensor<B>,
}

impl<B: Backend> Lse<B> {
    /// The sum of a large and a small number.
    pub(crate) fn of_sum(large: FloatTensor<B>, small: FloatTensor<B>) -> Self {
        let lse = B::float_add(large.clone(), small.clone());
        let rest = B::float_sub(small, B::float_sub(lse.clone(), large));
        let rest = B::float_mask_fill(rest, no_number::<B>(lse.clone()), 0.0f32.into());
        Self { lse, rest }
    }

    /// As a backward pass gets it, in the shape of rows of pairs.
    pub(crate) fn saved(saved: &Saved<B>, rows: &Shape) -> Self {
        let rest = match &saved.lse_rest {
            OptionalFloat::Some(rest) => rest.clone(),
            OptionalFloat::None => {
                B::float_zeros(rows.clone(), &saved.lse.device(), FloatDType::F32)
            }
        };
        Self {
            lse: B::float_reshape(saved.lse.clone(), rows.clone()),
            rest: B::float_reshape(rest, rows.clone()),
        }
    }

    /// How far logits are above the LSE. Large numbers cancel before anything small is subtracted.
    fn distance(self, logits: FloatTensor<B>) -> FloatTensor<B> {
        B::float_sub(B::float_sub(logits, self.lse), self.rest)
    }

    /// The weights of logits whose exponentials its sum has: none exceeds 1, whatever the rounding of both is.
    pub(crate) fn weights(self, logits: FloatTensor<B>) -> FloatTensor<B> {
        weights::<B>(self.distance(logits))
    }
}

/// The exponential of what is at most 0 but for its rounding. NaN stays.
fn weights<B: Backend>(above: FloatTensor<B>) -> FloatTensor<B> {
    let bools = bool_dtype::<B>(&above.device());
    let positive = B::float_greater_elem(above.clone(), 0.0f32.into(), bools);
    B::float_exp(B::float_mask_fill(above, positive, 0.0f32.into()))
}

/// Where a tensor is NaN or infinite.
fn no_number<B: Backend>(tensor: FloatTensor<B>) -> BoolTensor<B> {
    let bools = bool_dtype::<B>(&tensor.device());
    let size = B::float_abs(tensor.clone());
    let infinite = B::float_equal_elem(size, f32::INFINITY.into(), bools);
    B::bool_or(infinite, B::float_is_nan(tensor, bools))
}

/// The output in f32 and the LSE of logits.
pub(crate) fn attend<B: Backend>(
    logits: Logits<B>,
    v: FloatTensor<B>,
    problem: &Problem,
) -> Exact<B> {
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
    let lse = Lse::<B>::of_sum(max, B::float_log(l.clone()));

    let v = to_f32::<B>(v);
    let p = dropped::<B>(p, problem, &v.device());
    let sum = masked_matmul::<B>(p, logits.selected, v);
    let empty = B::float_equal_elem(l.clone(), 0.0f32.into(), bools);
    let out = B::float_div(sum, l);
    let empty = B::bool_expand(empty, out.shape());
    let out = B::float_mask_fill(out, empty, 0.0f32.into());
    debug_assert_eq!(lse.lse.shape(), rows);
    let of_rows = |t| B::float_reshape(t, Shape::new(problem.lse_shape()));
    Exact {
        out: B::float_reshape(out, Shape::new(problem.q_shape())),
        lse: Lse {
            lse: of_rows(lse.lse),
            rest: of_rows(lse.rest),
        },
    }
}

/// An output of f32, rounded to `element`, and the LSE.
pub(crate) fn rounded<B: Backend>(
    exact: Exact<B>,
    element: FloatDType,
) -> (FloatTensor<B>, FloatTensor<B>) {
    (B::float_cast(exact.out, element), exact.lse.lse)
}

/// The same, and what rounding lost: that of the output unless `element` is f32.
pub(crate) fn with_residual<B: Backend>(exact: Exact<B>, element: FloatDType) -> Forwarded<B> {
    let Exact { out: exact, lse } = exact;
    let out = B::float_cast(exact.clone(), element);
    let residual = match element {
        FloatDType::F32 => OptionalFloat::None,
        _ => {
            let rounded = B::float_cast(out.clone(), FloatDType::F32);
            // Beside NaN and infinity, which f16 may round to, there is nothing to add.
            let no_number = no_number::<B>(rounded.clone());
            let loss = B::float_mask_fill(B::float_sub(exact, rounded), no_number, 0.0f32.into());
            OptionalFloat::Some(B::float_cast(loss, element))
        }
    };
    Forwarded {
        out,
        residual,
        lse: lse.lse,
        lse_rest: lse.rest,
    }
}

/// The output in f32, with what its rounding lost.
pub(crate) fn unrounded<B: Backend>(
    out: FloatTensor<B>,
    residual: OptionalFloat<B>,
) -> FloatTensor<B> {
    let out = to_f32::<B>(out);
    match residual {
        OptionalFloat::None => out,
        OptionalFloat::Some(residual) => B::float_add(out, to_f32::<B>(residual)),
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
    let lse = Lse::saved(&saved, &rows);
    let (q, grad_out) = (grouped(q), grouped(saved.grad_out));
    let out = grouped(unrounded::<B>(saved.out, saved.residual));
    let (k, v) = (to_f32::<B>(k), to_f32::<B>(v));

    // A row whose weights are all zero has no gradient.
    let empty = B::float_equal_elem(lse.lse.clone(), f32::NEG_INFINITY.into(), bools);
    let alive = B::bool_expand(B::bool_not(empty), pairs);
    let selected = B::bool_and(logits.selected, alive);
    let unselected = B::bool_not(selected.clone());
    let keep = |t| B::float_mask_fill(t, unselected.clone(), 0.0f32.into());

    let p = keep(lse.weights(logits.logits));
    let device = v.device();
    let dp = B::float_matmul(grad_out.clone(), B::float_transpose(v));
    let dp = dropped::<B>(dp, problem, &device);
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
    let p = dropped::<B>(p, problem, &device);
    let grad_v = masked_matmul::<B>(B::float_transpose(p), selected_t, grad_out);
    let finish = |t, shape| B::float_cast(B::float_reshape(t, Shape::new(shape)), element);
    let grads = [
        finish(grad_q, problem.q_shape()),
        finish(grad_k, problem.kv_shape()),
        finish(grad_v, problem.kv_shape()),
    ];
    (grads, grad_logits)
}

/// The change of a query's keys by which a rank learns.
#[derive(Clone, Copy)]
pub(crate) enum Change {
    /// A runner-up is attended as well.
    Added,
    /// A kept key is not.
    LeftOut(LeaveOneOut),
}

impl Change {
    /// What a query has from a key whose logit is `x` above its LSE: the factor of `v - out`, and the part of the LSE.
    fn parts<B: Backend>(self, x: FloatTensor<B>) -> [FloatTensor<B>; 2] {
        match self {
            Self::Added => {
                let bools = bool_dtype::<B>(&x.device());
                let negative = B::float_lower_elem(x.clone(), 0.0f32.into(), bools);
                let e = B::float_exp(B::float_neg(B::float_abs(x.clone())));
                let larger = B::float_recip(B::float_add_scalar(e.clone(), 1.0f32.into()));
                let smaller = B::float_mul(e.clone(), larger.clone());
                let sigmoid = B::float_mask_where(larger, negative.clone(), smaller);
                let positive = B::float_mask_fill(x, negative, 0.0f32.into());
                [sigmoid, B::float_add(positive, B::float_log1p(e))]
            }
            Self::LeftOut(how) => {
                let p = weights::<B>(x);
                let rest =
                    B::float_add_scalar(B::float_neg(p.clone()), (1.0 + how.besides()).into());
                let weight = B::float_div(p, rest);
                [weight.clone(), B::float_log1p(weight)]
            }
        }
    }
}

/// What the loss has from the keys of the selected pairs by a change, shaped as [`Logits`].
pub(crate) fn changes<B: Backend>(
    logits: Logits<B>,
    change: Change,
    v: FloatTensor<B>,
    saved: &Saved<B>,
    problem: &Problem,
) -> FloatTensor<B> {
    let bools = bool_dtype::<B>(&v.device());
    let (rows, pairs) = (logits.row_shape(), logits.logits.shape());
    let out = unrounded::<B>(saved.out.clone(), saved.residual.cloned());
    let out = grouped::<B>(out, problem);
    let grad_out = grouped::<B>(to_f32::<B>(saved.grad_out.clone()), problem);
    let lse = Lse::saved(saved, &rows);
    let empty = B::float_equal_elem(lse.lse.clone(), f32::NEG_INFINITY.into(), bools);
    let alive = B::bool_expand(B::bool_not(empty), pairs);
    let selected = B::bool_and(logits.selected, alive);

    let x = lse.distance(logits.logits);
    let [weight, of_lse] = change.parts::<B>(x);
    let dp = B::float_matmul(grad_out.clone(), B::float_transpose(to_f32::<B>(v)));
    let mean = B::float_sum_dim(B::float_mul(grad_out, out), 3);
    let mut change = B::float_mul(weight, B::float_sub(dp, mean));
    if let OptionalFloat::Some(grad_lse) = &saved.grad_lse {
        let grad_lse = B::float_reshape(grad_lse.clone(), rows);
        change = B::float_add(change, B::float_mul(of_lse, grad_lse));
    }
    B::float_mask_fill(change, B::bool_not(selected), 0.0f32.into())
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
    /// One value per query.
    fn row_shape(&self) -> Shape {
        let [batch, heads, rows, _] = self.logits.shape().dims();
        Shape::new([batch, heads, rows, 1])
    }
}

/// The scaled and possibly capped products `[batch, kv_heads, group * q_len, k_len]`, with ALiBi, and with a cap their
/// `tanh`.
pub(crate) fn products<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    p: &Problem,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let q = grouped::<B>(to_f32::<B>(q), p);
    let k = to_f32::<B>(k);
    let device = k.device();
    let x = B::float_mul_scalar(B::float_matmul(q, B::float_transpose(k)), p.scale.into());
    let (x, tanh) = match p.softcap {
        None => (x, None),
        Some(cap) => {
            let tanh = B::float_tanh(B::float_div_scalar(x, cap.into()));
            (B::float_mul_scalar(tanh.clone(), cap.into()), Some(tanh))
        }
    };
    (alibi::biased::<B>(x, p, &device), tanh)
}

/// `weights . values` over the selected pairs only.
///
/// The weights of the other pairs are zero, but `0 * NaN` is NaN, and the contents of an unselected row
/// must not matter. So the product is taken over the finite values, and the contribution of the others
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

/// Whether a problem has no pair of a query and a key, so that nothing is attended.
pub(crate) fn is_empty(problem: &Problem) -> bool {
    problem.k_len == 0 || problem.q_len == 0 || problem.batch == 0
}

/// The output in f32 and the LSE of a problem without pairs.
pub(crate) fn attend_nothing<B: Backend>(device: &B::Device, problem: &Problem) -> Exact<B> {
    let shape = Shape::new(problem.lse_shape());
    Exact {
        out: zeros::<B>(problem.q_shape(), device, FloatDType::F32),
        lse: Lse {
            lse: B::float_full(
                shape.clone(),
                f32::NEG_INFINITY.into(),
                device,
                FloatDType::F32,
            ),
            rest: B::float_zeros(shape, device, FloatDType::F32),
        },
    }
}
