//! Attention under masks and biases as functions on `Tensor`: validation, then one dispatch.

use crate::mask::plan::TilePlan;
use crate::mask::polarity::AttentionMask;
use crate::ops::masked::MaskedAttentionOps;
use crate::ops::types::{Masking, OptionalFloat, OptionalPlan};
use crate::validate::{element_type, expect, rows_element, same_device, supported};
use burn::backend::Dispatch;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use flash_dma_problem::{AttentionError, AttentionOptions, MaskedProblem, TensorName};

/// Attention under a mask and a bias: `out_i = sum_j softmax_j(softcap(scale * q_i . k_j) + bias_ij) v_j` over
/// the keys `j` that the mask shows to query `i`, and causal masking if the options ask for it.
///
/// | tensor | shape | type |
/// |---|---|---|
/// | `q`, result | `[batch, q_heads, q_len, head_dim]` | f32, f16 or bf16 |
/// | `k`, `v` | `[batch, kv_heads, k_len, head_dim]` | as `q` |
/// | `mask` | `[batch \| 1, q_heads \| kv_heads \| 1, q_len \| 1, k_len \| 1]` | bool |
/// | `bias` | as `mask`, another one of these shapes | f32, f16 or bf16, whatever that of `q` |
///
/// Differentiable in `q`, `k`, `v` and `bias`, whichever are tracked; the gradient of the bias has its own
/// shape and type and is accumulated in f32. A query that sees nothing gets zeros, and gives no gradients. The mask is
/// cut into tiles first; to do so once for several calls, make a [`TilePlan`].
///
/// ```
/// # #[cfg(all(feature = "flex", feature = "autodiff"))] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_dma::{AttentionMask, AttentionOptions, masked_attention};
///
/// let device = Device::flex().autodiff();
/// let normal = Distribution::Normal(0.0, 1.0);
/// let q = Tensor::<4>::random([1, 4, 100, 32], normal, &device);
/// let k = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
/// let v = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
/// // One number a key and kv head, and no key attends to the last ten.
/// let bias = Tensor::<4>::random([1, 2, 1, 100], normal, &device).require_grad();
/// let padding = Tensor::<1, burn::tensor::Int>::arange(0..100, &device).greater_equal_elem(90);
///
/// let mask = AttentionMask::hidden(padding.reshape([1, 1, 1, 100]));
/// let out = masked_attention(q, k, v, Some(mask), Some(bias.clone()), AttentionOptions::new());
/// let grads = out.sum().backward();
/// assert_eq!(bias.grad(&grads).unwrap().dims(), [1, 2, 1, 100]);
/// # }
/// ```
///
/// # Panics
///
/// Where [`try_masked_attention`] returns an error, with its text.
#[must_use]
pub fn masked_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Option<AttentionMask>,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
) -> Tensor<4> {
    expect(try_masked_attention(q, k, v, mask, bias, options))
}

/// As [`masked_attention`].
///
/// # Errors
///
/// [`AttentionError`] if the shapes, element types, devices or options do not fit; nothing is computed then.
pub fn try_masked_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Option<AttentionMask>,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let (out, _) = Call::new([q, k, v], mask.as_ref().map(Mask::Tensor), bias, options)?
        .run(Dispatch::masked_attention_forward);
    Ok(out)
}

/// As [`masked_attention`], with the LSE of the logits beside the output: `[batch, q_heads, q_len]`, f32,
/// natural logarithm, −∞ where nothing is seen. Both are differentiable.
///
/// # Panics
///
/// Where [`try_masked_attention_with_lse`] returns an error, with its text.
#[must_use]
pub fn masked_attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Option<AttentionMask>,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
) -> (Tensor<4>, Tensor<3>) {
    expect(try_masked_attention_with_lse(q, k, v, mask, bias, options))
}

/// As [`masked_attention_with_lse`].
///
/// # Errors
///
/// As [`try_masked_attention`].
pub fn try_masked_attention_with_lse(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Option<AttentionMask>,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let call = Call::new([q, k, v], mask.as_ref().map(Mask::Tensor), bias, options)?;
    Ok(call.run(Dispatch::masked_attention_forward_with_lse))
}

/// As [`masked_attention`] with a mask that was cut into tiles before, for lengths and causal masking as in
/// this call.
///
/// # Panics
///
/// Where [`try_masked_attention_with_plan`] returns an error, with its text.
#[must_use]
pub fn masked_attention_with_plan(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    plan: &TilePlan,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
) -> Tensor<4> {
    expect(try_masked_attention_with_plan(q, k, v, plan, bias, options))
}

/// As [`masked_attention_with_plan`].
///
/// # Errors
///
/// As [`try_masked_attention`]; further if the plan is of other lengths, of another causal masking, or on
/// another device.
pub fn try_masked_attention_with_plan(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    plan: &TilePlan,
    bias: Option<Tensor<4>>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let mask = Some(Mask::Plan(plan));
    let (out, _) =
        Call::new([q, k, v], mask, bias, options)?.run(Dispatch::masked_attention_forward);
    Ok(out)
}

/// A mask in either form.
enum Mask<'a> {
    Tensor(&'a AttentionMask),
    Plan(&'a TilePlan),
}

/// A validated call.
struct Call {
    rows: [Tensor<4>; 3],
    plan: Option<TilePlan>,
    /// Present exactly if the problem has a bias.
    bias: Option<Tensor<4>>,
    problem: MaskedProblem,
}

impl Call {
    fn new(
        rows: [Tensor<4>; 3],
        mask: Option<Mask<'_>>,
        bias: Option<Tensor<4>>,
        options: AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let element = rows_element(&rows)?;
        let [q, k, v] = rows.each_ref().map(|t| t.dims());
        let bias_shape = bias.as_ref().map(|bias| bias.dims());
        let bias_shape = bias_shape.as_ref().map(<[usize; 4]>::as_slice);
        let problem = match &mask {
            Some(Mask::Plan(plan)) => {
                let plan = plan.geometry();
                MaskedProblem::with_plan(&q, &k, &v, plan, bias_shape, element, &options)?
            }
            mask => {
                let mask_shape = match mask {
                    Some(Mask::Tensor(mask)) => Some(mask.dims()),
                    _ => None,
                };
                let mask_shape = mask_shape.as_ref().map(<[usize; 4]>::as_slice);
                MaskedProblem::new(&q, &k, &v, mask_shape, bias_shape, element, &options)?
            }
        };
        let device = supported(&rows, element)?;
        match &mask {
            Some(Mask::Tensor(mask)) => same_device(&device, TensorName::Mask, mask.device())?,
            Some(Mask::Plan(plan)) => plan.check_device(&device)?,
            None => {}
        }
        if let Some(bias) = &bias {
            same_device(&device, TensorName::Bias, bias.device())?;
            element_type(TensorName::Bias, bias)?;
        }
        // Nothing is computed before this line.
        let plan = match (mask, problem.plan) {
            (Some(Mask::Tensor(mask)), Some(geometry)) => {
                Some(TilePlan::of(mask.clone(), geometry))
            }
            (Some(Mask::Plan(plan)), _) => Some(plan.clone()),
            _ => None,
        };
        Ok(Self {
            rows,
            plan,
            bias,
            problem,
        })
    }

    fn run(self, operation: Operation) -> (Tensor<4>, Tensor<3>) {
        let [q, k, v] = self.rows.map(Tensor::into_dispatch);
        let masking = Masking {
            plan: match self.plan {
                None => OptionalPlan::<Dispatch>::None,
                Some(plan) => plan.into_dispatch(),
            },
            bias: match self.bias {
                None => OptionalFloat::<Dispatch>::None,
                Some(bias) => OptionalFloat::Some(bias.into_dispatch()),
            },
        };
        let (out, lse) = operation(q, k, v, masking, self.problem);
        (Tensor::from_dispatch(out), Tensor::from_dispatch(lse))
    }
}

/// One of the two forward operations.
type Operation = fn(
    FloatTensor<Dispatch>,
    FloatTensor<Dispatch>,
    FloatTensor<Dispatch>,
    Masking<Dispatch>,
    MaskedProblem,
) -> (FloatTensor<Dispatch>, FloatTensor<Dispatch>);
