//! Attention under masks and biases: validation, then one dispatch.

use super::state::{Masked, NoMask};
use crate::engines;
use crate::mask::plan::TilePlan;
use crate::mask::polarity::AttentionMask;
use crate::ops::masked::MaskedAttentionOps;
use crate::spans::span;
use crate::types::{Masking, OptionalFloat, OptionalPlan, Wanted};
use crate::validate::{element_type, is_tracked, rows_element, same_device, supported, tracked};
use burn::backend::Dispatch;
use burn::tensor::Tensor;
use flash_dma_problem::{AttentionError, AttentionOptions, MaskedProblem, TensorName};
use std::marker::PhantomData;

/// A call of attention under a mask and a bias.
///
/// | tensor | shape | type |
/// |---|---|---|
/// | `q`, output | `[batch, q_heads, q_len, head_dim]` | f32, f16 or bf16 |
/// | `k`, `v` | `[batch, kv_heads, k_len, head_dim]` | as `q` |
/// | mask | `[batch \| 1, q_heads \| kv_heads \| 1, q_len \| 1, k_len \| 1]` | bool |
/// | bias | as the mask, another one of these shapes | f32, f16 or bf16, independent of `q` |
/// | LSE | `[batch, q_heads, q_len]` | f32 |
///
/// `out_i = sum_j softmax_j(softcap(scale * q_i . k_j) + bias_ij) v_j` over the keys `j` that the mask shows to query
/// `i`, under causal masking if the options ask for it. Takes a mask or a plan of one, not both; for intervals and
/// scores use [`Attention`](crate::Attention).
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_dma::{AttentionOptions, KeyRanges, MaskedAttention, TilePlan};
///
/// let device = Device::flex();
/// let normal = Distribution::Normal(0.0, 1.0);
/// let q = Tensor::<4>::random([1, 4, 100, 32], normal, &device);
/// let k = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
/// let v = Tensor::<4>::random([1, 2, 100, 32], normal, &device);
/// let bias = Tensor::<4>::random([1, 4, 1, 100], normal, &device);
///
/// // One plan of a sliding window for two layers.
/// let window = KeyRanges::sliding_window([100, 100], 20, &device);
/// let plan = TilePlan::from_ranges(window, [100, 100], true);
/// let hidden = MaskedAttention::new(q, k.clone(), v.clone()).plan(&plan).bias(bias).forward();
/// let (out, lse) = MaskedAttention::new(hidden, k, v)
///     .plan(&plan)
///     .options(AttentionOptions::new().with_softcap(20.0))
///     .forward_with_lse();
/// assert_eq!((out.dims(), lse.dims()), ([1, 4, 100, 32], [1, 4, 100]));
/// # }
/// ```
///
/// A mask together with a plan does not compile:
///
/// ```compile_fail
/// # use burn_flash_dma::{AttentionMask, MaskedAttention, TilePlan};
/// # fn two_masks(q: burn::tensor::Tensor<4>, plan: &TilePlan, mask: AttentionMask) {
/// MaskedAttention::new(q.clone(), q.clone(), q).plan(plan).mask(mask);
/// # }
/// ```
///
/// Differentiable in `q`, `k`, `v` and the bias, whichever are tracked; the gradient of the bias has the bias's shape
/// and type and is accumulated in f32. A query that sees nothing gets zeros, and gives no gradients.
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `forward`"]
pub struct MaskedAttention<M = NoMask> {
    pub(super) rows: [Tensor<4>; 3],
    pub(super) mask: Option<Mask>,
    pub(super) bias: Option<Tensor<4>>,
    options: AttentionOptions,
    state: PhantomData<M>,
}

impl MaskedAttention {
    /// Attention of `q` over `k` and `v`, with [`AttentionOptions::new`].
    pub fn new(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Self {
        Self {
            rows: [q, k, v],
            mask: None,
            bias: None,
            options: AttentionOptions::new(),
            state: PhantomData,
        }
    }

    /// Which keys each query sees: an [`AttentionMask`], or an `Option` of one. The call cuts it into tiles.
    pub fn mask(self, mask: impl Into<Option<AttentionMask>>) -> MaskedAttention<Masked> {
        self.masked(mask.into().map(Mask::Tensor))
    }

    /// Which keys each query sees, as a tile plan for the lengths and the causal masking of this call.
    pub fn plan(self, plan: &TilePlan) -> MaskedAttention<Masked> {
        self.masked(Some(Mask::Plan(plan.clone())))
    }

    pub(crate) fn masked(self, mask: Option<Mask>) -> MaskedAttention<Masked> {
        MaskedAttention {
            rows: self.rows,
            mask,
            bias: self.bias,
            options: self.options,
            state: PhantomData,
        }
    }
}

impl<M> MaskedAttention<M> {
    /// Bias added to the logits: a tensor, or an `Option` of one.
    pub fn bias(mut self, bias: impl Into<Option<Tensor<4>>>) -> Self {
        self.bias = bias.into();
        self
    }

    /// Causal masking, scale, softcap and determinism. `keep_window` must be `None`.
    pub fn options(mut self, options: AttentionOptions) -> Self {
        self.options = options;
        self
    }

    twin! {
        /// The output, `[batch, q_heads, q_len, head_dim]` in the type of `q`.
        pub fn forward(self) -> Tensor<4> = Self::try_forward;
    }

    /// Like [`forward`](Self::forward), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the shapes, element types, devices or options do not fit, or the plan has other lengths,
    /// other causal masking or another device; nothing is computed then.
    pub fn try_forward(self) -> Result<Tensor<4>, AttentionError> {
        Ok(self.run(Wanted::Out)?.0)
    }

    twin! {
        /// The output, and the LSE of the logits: `[batch, q_heads, q_len]`, f32, natural logarithm, −∞ where nothing is
        /// seen. Both are differentiable.
        pub fn forward_with_lse(self) -> (Tensor<4>, Tensor<3>) = Self::try_forward_with_lse;
    }

    /// Like [`forward_with_lse`](Self::forward_with_lse), but returns the error.
    ///
    /// # Errors
    ///
    /// See [`try_forward`](Self::try_forward).
    pub fn try_forward_with_lse(self) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        self.run(Wanted::OutAndLse)
    }

    /// The call after its checks, and its problem. Nothing has been computed.
    pub(super) fn checked(self) -> Result<(Self, MaskedProblem), AttentionError> {
        let (rows, options) = (&self.rows, &self.options);
        let element = rows_element(rows)?;
        let [q, k, v] = rows.each_ref().map(|t| t.dims());
        let bias_shape = self.bias.as_ref().map(|bias| bias.dims());
        let bias_shape = bias_shape.as_ref().map(<[usize; 4]>::as_slice);
        let problem = match &self.mask {
            None => MaskedProblem::new(&q, &k, &v, None, bias_shape, element, options)?,
            Some(Mask::Tensor(mask)) => {
                let shape = mask.dims();
                MaskedProblem::new(&q, &k, &v, Some(&shape), bias_shape, element, options)?
            }
            Some(Mask::Plan(plan)) => {
                let plan = plan.geometry();
                MaskedProblem::with_plan(&q, &k, &v, plan, bias_shape, element, options)?
            }
        };
        let device = supported(rows, element)?;
        match &self.mask {
            Some(Mask::Tensor(mask)) => same_device(&device, TensorName::Mask, mask.device())?,
            Some(Mask::Plan(plan)) => {
                same_device(&device, TensorName::Plan, plan.counts().device())?
            }
            None => {}
        }
        if let Some(bias) = &self.bias {
            same_device(&device, TensorName::Bias, bias.device())?;
            element_type(TensorName::Bias, bias)?;
        }
        let gradients = tracked(rows) || self.bias.as_ref().is_some_and(is_tracked);
        engines::check(&problem, &device, gradients)?;
        Ok((self, problem))
    }

    fn run(self, wanted: Wanted) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
        let _span = span!("masked_attention");
        let (call, problem) = self.checked()?;
        let plan = match (call.mask, problem.plan) {
            (Some(Mask::Tensor(mask)), Some(geometry)) => Some(TilePlan::of(mask, geometry)),
            (Some(Mask::Plan(plan)), _) => Some(plan),
            _ => None,
        };
        let [q, k, v] = call.rows.map(Tensor::into_dispatch);
        let masking = Masking {
            plan: match plan {
                None => OptionalPlan::<Dispatch>::None,
                Some(plan) => plan.into_dispatch(),
            },
            bias: OptionalFloat::from_option(call.bias.map(|bias| bias.into_dispatch())),
        };
        let results = Dispatch::masked_attention_forward(q, k, v, masking, problem, wanted);
        let [out, lse] = [results.out, results.lse];
        Ok((Tensor::from_dispatch(out), Tensor::from_dispatch(lse)))
    }
}

/// A mask or a plan.
// There is one per call, moved a few times.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug)]
pub(crate) enum Mask {
    Tensor(AttentionMask),
    Plan(TilePlan),
}
