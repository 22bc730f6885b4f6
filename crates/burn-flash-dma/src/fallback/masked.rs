//! Attention under masks and biases: [`MaskedAttentionOps`](crate::ops::MaskedAttentionOps).

use super::logits::{
    Exact, Logits, attend, attend_nothing, gradients, is_empty, products, rounded, with_residual,
};
use super::tensors::{bool_dtype, positions_and_keys, zeros};
use crate::ops::types::{
    Forwarded, MaskedGrads, Masking, OptionalFloat, OptionalPlan, PlanTensors, Saved,
};
use crate::spans::span;
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, IntDType, Shape, Slice};
use flash_dma_problem::{MaskedProblem, PlanGeometry, Problem};

/// Bits of a word.
const WORD: usize = 32;
const KEYS: usize = PlanGeometry::KEY_BLOCK;
const QUERIES: usize = PlanGeometry::QUERY_BLOCK;

/// See [`MaskedAttentionOps::masked_attention_plan`](crate::ops::MaskedAttentionOps::masked_attention_plan).
pub fn plan<B: Backend>(
    mask: BoolTensor<B>,
    hidden: bool,
    geometry: PlanGeometry,
) -> PlanTensors<B> {
    let _span = span!("tile_plan", engine = "default-bodies");
    let device = mask.device();
    let [batch, heads, queries, keys] = geometry.mask;
    let mask = if hidden { B::bool_not(mask) } else { mask };
    let (bits_shape, counts_shape) = (geometry.bits_shape(), geometry.counts_shape());
    let zeros = |shape| B::int_zeros(shape, &device, IntDType::I32);
    let bits = if bits_shape.contains(&0) {
        zeros(Shape::new(bits_shape))
    } else if keys == 1 {
        // All bits of a word are that of the one key: -1 or 0.
        let words = B::int_neg(B::bool_into_int(mask.clone(), IntDType::I32));
        let words = B::int_expand(words, Shape::new([batch, heads, queries, 2]));
        B::int_reshape(words, Shape::new(bits_shape))
    } else {
        let blocks = bits_shape[2];
        let padded = pad::<B>(
            B::bool_into_int(mask.clone(), IntDType::I32),
            3,
            blocks * KEYS,
        );
        let shape = Shape::new([batch, heads, queries, blocks * 2, WORD]);
        // The sum of distinct powers of two, the last negative, never leaves 32 bits.
        let weights = B::int_expand(
            B::int_reshape(powers::<B>(&device), Shape::new([1, 1, 1, 1, WORD])),
            shape.clone(),
        );
        let words = B::int_sum_dim(B::int_mul(B::int_reshape(padded, shape), weights), 4);
        let words = B::int_reshape(words, Shape::new([batch, heads, queries, blocks, 2]));
        // Contiguous, as every engine's.
        B::int_reshape(
            B::int_add_scalar(B::int_swap_dims(words, 2, 3), 0.into()),
            Shape::new(bits_shape),
        )
    };
    let counts = if counts_shape.contains(&0) {
        zeros(Shape::new(counts_shape))
    } else {
        let square = Shape::new([batch, heads, geometry.q_len, geometry.k_len]);
        let lengths = [geometry.q_len, geometry.k_len];
        let (position, key) =
            positions_and_keys::<B>(lengths, geometry.causal, &device, square.clone());
        let visible = B::int_lower_equal(key, position, bool_dtype::<B>(&device));
        let visible = B::bool_and(B::bool_expand(mask, square), visible);
        let ones = B::bool_into_int(visible, IntDType::I32);
        let [_, _, query_blocks, key_blocks] = counts_shape;
        let ones = pad::<B>(
            pad::<B>(ones, 2, query_blocks * QUERIES),
            3,
            key_blocks * KEYS,
        );
        let rows = batch * heads;
        let shape = [rows * query_blocks, QUERIES, key_blocks, KEYS];
        let sums = B::int_sum_dim(B::int_reshape(ones, Shape::new(shape)), 3);
        B::int_reshape(B::int_sum_dim(sums, 1), Shape::new(counts_shape))
    };
    PlanTensors { bits, counts }
}

/// See
/// [`MaskedAttentionOps::masked_attention_plan_ranges`](crate::ops::MaskedAttentionOps::masked_attention_plan_ranges).
pub fn plan_ranges<B: Backend>(
    first: IntTensor<B>,
    end: IntTensor<B>,
    geometry: PlanGeometry,
) -> PlanTensors<B> {
    let device = first.device();
    let bools = bool_dtype::<B>(&device);
    let shape = Shape::new(geometry.mask);
    let keys = B::int_arange(0..geometry.k_len as i64, &device, IntDType::I32);
    let keys = B::int_reshape(keys, Shape::new([1, 1, 1, geometry.k_len]));
    let keys = B::int_expand(keys, shape.clone());
    let [first, end] = [first, end].map(|t| B::int_expand(t, shape.clone()));
    let from = B::int_lower_equal(first, keys.clone(), bools);
    plan::<B>(
        B::bool_and(from, B::int_lower(keys, end, bools)),
        false,
        geometry,
    )
}

/// See [`MaskedAttentionOps::masked_attention_forward`](crate::ops::MaskedAttentionOps::masked_attention_forward).
pub fn forward<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    masking: Masking<B>,
    problem: MaskedProblem,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let _span = span!("forward", engine = "default-bodies");
    let element: FloatDType = q.dtype().into();
    rounded::<B>(exact::<B>([q, k, v], masking, &problem), element)
}

/// See
/// [`MaskedAttentionOps::masked_attention_forward_with_residual`](crate::ops::MaskedAttentionOps::masked_attention_forward_with_residual).
pub fn forward_with_residual<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    masking: Masking<B>,
    problem: MaskedProblem,
) -> Forwarded<B> {
    let _span = span!("forward", engine = "default-bodies");
    let element: FloatDType = q.dtype().into();
    with_residual::<B>(exact::<B>([q, k, v], masking, &problem), element)
}

/// The results before the output is rounded.
fn exact<B: Backend>(
    [q, k, v]: [FloatTensor<B>; 3],
    masking: Masking<B>,
    problem: &MaskedProblem,
) -> Exact<B> {
    let p = &problem.attention;
    if is_empty(p) {
        return attend_nothing::<B>(&q.device(), p);
    }
    attend::<B>(logits::<B>(q, k, masking, problem), v, p)
}

/// See [`MaskedAttentionOps::masked_attention_backward`](crate::ops::MaskedAttentionOps::masked_attention_backward).
pub fn backward<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    masking: Masking<B>,
    saved: Saved<B>,
    problem: MaskedProblem,
    bias_gradient: bool,
) -> MaskedGrads<B> {
    let _span = span!("backward", engine = "default-bodies");
    let p = &problem.attention;
    let element: FloatDType = q.dtype().into();
    let device = q.device();
    let bias = problem.bias.filter(|_| bias_gradient);
    let ([q, k, v], grad_bias) = if is_empty(p) {
        let zeros = |shape: [usize; 4]| zeros::<B>(shape, &device, element);
        let grads = [p.q_shape(), p.kv_shape(), p.kv_shape()].map(zeros);
        (
            grads,
            bias.map(|shape| self::zeros::<B>(shape, &device, FloatDType::F32)),
        )
    } else {
        let logits = logits::<B>(q.clone(), k.clone(), masking, &problem);
        let of_rows = problem.has_row_bias();
        let rows = of_rows.then(|| lse_gradients::<B>(&saved, p));
        let (grads, dlogits) = gradients::<B>(logits, [q, k, v], saved, p);
        let terms = |rows| row_gradients::<B>(rows, &dlogits);
        let terms = rows.map_or_else(|| dlogits.clone(), terms);
        (
            grads,
            bias.map(|shape| sum_to_bias::<B>(terms, shape, &problem)),
        )
    };
    MaskedGrads {
        q,
        k,
        v,
        bias: OptionalFloat::from_option(grad_bias),
    }
}

/// The dense logits, biases added, and which of them are visible.
fn logits<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    masking: Masking<B>,
    problem: &MaskedProblem,
) -> Logits<B> {
    let p = &problem.attention;
    let device = q.device();
    let bools = bool_dtype::<B>(&device);
    let (x, tanh) = products::<B>(q, k, p);
    let logits = match (masking.bias, problem.bias) {
        (OptionalFloat::Some(bias), Some(shape)) => {
            let [split, whole, flat] = head_shapes(problem, shape);
            let bias = B::float_cast(bias, FloatDType::F32);
            let bias = B::float_expand(B::float_reshape(bias, split), whole);
            B::float_add(x, B::float_reshape(bias, flat))
        }
        _ => x,
    };
    let square = Shape::new([p.batch, p.q_heads, p.q_len, p.k_len]);
    let (position, key) = positions_and_keys::<B>([p.q_len, p.k_len], p.causal, &device, square);
    let visible = B::int_lower_equal(key, position, bools);
    let visible = B::bool_reshape(visible, logits.shape());
    let selected = match (masking.plan, &problem.plan) {
        (OptionalPlan::Some { bits, .. }, Some(plan)) => {
            let mut shape = plan.mask;
            // A mask of no keys was unpacked above.
            shape[3] = plan.mask[3].max(1);
            let [split, whole, flat] = head_shapes(problem, shape);
            let shown = B::bool_reshape(unpack::<B>(bits, plan), split);
            let shown = B::bool_reshape(B::bool_expand(shown, whole), flat);
            B::bool_and(visible, shown)
        }
        _ => visible,
    };
    Logits {
        logits,
        selected,
        tanh,
    }
}

/// The mask in its own shape, from its bits.
pub(crate) fn unpack<B: Backend>(bits: IntTensor<B>, plan: &PlanGeometry) -> BoolTensor<B> {
    let device = bits.device();
    let [batch, heads, blocks, queries, _] = plan.bits_shape();
    let shape = Shape::new([batch * heads, blocks, queries, 2, WORD]);
    let words = B::int_reshape(bits, Shape::new([batch * heads, blocks, queries, 2, 1]));
    let powers = B::int_reshape(powers::<B>(&device), Shape::new([1, 1, 1, 1, WORD]));
    let masked = B::bitwise_and(
        B::int_expand(words, shape.clone()),
        B::int_expand(powers, shape),
    );
    let shown = B::bool_not(B::int_equal_elem(
        masked,
        0.into(),
        bool_dtype::<B>(&device),
    ));
    let shown = B::bool_swap_dims(shown, 1, 2);
    let shown = B::bool_reshape(shown, Shape::new([batch, heads, queries, blocks * KEYS]));
    let mut slices = vec![Slice::full(); 3];
    slices.push((0..plan.mask[3]).into());
    B::bool_slice(shown, &slices)
}

/// For a mask or bias of `shape`: its shape with the group of heads as an axis of its own, the same broadcast
/// to every pair, and that with the group's queries as rows.
fn head_shapes(problem: &MaskedProblem, [b, h, q, k]: [usize; 4]) -> [Shape; 3] {
    let p = &problem.attention;
    let (heads, group) = match problem.heads_each(h) {
        1 => (p.kv_heads, p.group()),
        _ => (h, 1),
    };
    [
        Shape::new([b, heads, group, q, k]),
        Shape::new([p.batch, p.kv_heads, p.group(), p.q_len, p.k_len]),
        Shape::new([p.batch, p.kv_heads, p.group() * p.q_len, p.k_len]),
    ]
}

/// The gradients of the rows' LSE, `[batch, kv_heads, group * q_len, 1]`; 0 for a row that sees nothing.
fn lse_gradients<B: Backend>(saved: &Saved<B>, p: &Problem) -> FloatTensor<B> {
    let device = saved.lse.device();
    let shape = [p.batch, p.kv_heads, p.group() * p.q_len, 1];
    let OptionalFloat::Some(grad_lse) = &saved.grad_lse else {
        return zeros::<B>(shape, &device, FloatDType::F32);
    };
    let bools = bool_dtype::<B>(&device);
    let empty = B::float_equal_elem(saved.lse.clone(), f32::NEG_INFINITY.into(), bools);
    let rows = B::float_mask_fill(grad_lse.clone(), empty, 0.0f32.into());
    B::float_reshape(rows, Shape::new(shape))
}

/// The gradients of a bias of rows, from those of their LSE, which they equal, and NaN where a pair's is: see
/// [`MaskedProblem::has_row_bias`].
fn row_gradients<B: Backend>(rows: FloatTensor<B>, dlogits: &FloatTensor<B>) -> FloatTensor<B> {
    let bools = bool_dtype::<B>(&rows.device());
    let sums = B::float_sum_dim(dlogits.clone(), 3);
    let nan = B::float_is_nan(sums.clone(), bools);
    B::float_mask_where(rows, nan, sums)
}

/// Gradients of the logits of all pairs, or of rows if the bias has one key, summed over the axes that it broadcasts.
fn sum_to_bias<B: Backend>(
    gradients: FloatTensor<B>,
    shape: [usize; 4],
    problem: &MaskedProblem,
) -> FloatTensor<B> {
    let [split, mut whole, _] = head_shapes(problem, shape);
    whole[4] = split[4];
    let mut sum = B::float_reshape(gradients, whole.clone());
    for axis in (0..5).filter(|&axis| split[axis] == 1 && whole[axis] != 1) {
        sum = B::float_sum_dim(sum, axis);
    }
    B::float_reshape(sum, Shape::new(shape))
}

/// `2^0 .. 2^31` as 32-bit words.
fn powers<B: Backend>(device: &B::Device) -> IntTensor<B> {
    let exponents = B::int_arange(0..WORD as i64, device, IntDType::I32);
    let ones = B::int_ones(Shape::new([WORD]), device, IntDType::I32);
    B::bitwise_left_shift(ones, exponents)
}

/// Zeros behind an axis of a tensor of four axes, up to `len`.
fn pad<B: Backend>(tensor: IntTensor<B>, axis: usize, len: usize) -> IntTensor<B> {
    let mut shape: [usize; 4] = tensor.shape().dims();
    if shape[axis] == len {
        return tensor;
    }
    shape[axis] = len - shape[axis];
    let zeros = B::int_zeros(Shape::new(shape), &tensor.device(), IntDType::I32);
    B::int_cat(vec![tensor, zeros], axis)
}
