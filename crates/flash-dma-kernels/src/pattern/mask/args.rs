//! The tensors of a masked call, and their checks.

use crate::host::check::{Layout, check_tensor};
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, MaskedProblem, PlanGeometry, TensorName};

/// A mask as written by [`plan`](crate::plan()); both contiguous, 32-bit integers.
#[derive(Clone, Debug)]
pub struct MaskBits {
    /// [`PlanGeometry::bits_shape`](flash_dma_problem::PlanGeometry::bits_shape).
    pub bits: TensorBinding,
    /// [`PlanGeometry::counts_shape`](flash_dma_problem::PlanGeometry::counts_shape).
    pub counts: TensorBinding,
}

/// The inputs of attention under a mask and a bias, shaped as the problem says.
#[derive(Clone, Debug)]
pub struct MaskedInputs {
    /// `[batch, q_heads, q_len, head_dim]`, the problem's element type.
    pub q: TensorBinding,
    /// `[batch, kv_heads, k_len, head_dim]`, the problem's element type.
    pub k: TensorBinding,
    /// `[batch, kv_heads, k_len, head_dim]`, the problem's element type.
    pub v: TensorBinding,
    /// Given exactly if the problem has a plan.
    pub plan: Option<MaskBits>,
    /// f32, any strides on any axis; given exactly if the problem has a bias.
    pub bias: Option<TensorBinding>,
}

/// The outputs of the masked backward pass; contiguous and overwritten.
#[derive(Clone, Debug)]
pub struct MaskedGradients {
    /// `[batch, q_heads, q_len, head_dim]`, the problem's element type.
    pub q: TensorBinding,
    /// `[batch, kv_heads, k_len, head_dim]`, the problem's element type.
    pub k: TensorBinding,
    /// `[batch, kv_heads, k_len, head_dim]`, the problem's element type.
    pub v: TensorBinding,
    /// f32, in the bias's own shape, if there is a bias; `None` skips its computation.
    pub bias: Option<TensorBinding>,
}

impl MaskBits {
    pub(crate) fn check(&self, geometry: &PlanGeometry) -> Result<(), AttentionError> {
        let (bits, counts) = (geometry.bits_shape(), geometry.counts_shape());
        let contiguous = Layout::Contiguous;
        check_tensor(TensorName::Plan, &self.bits, &bits, 4, contiguous)?;
        check_tensor(TensorName::Plan, &self.counts, &counts, 4, contiguous)
    }
}

impl MaskedInputs {
    pub(crate) fn check(&self, problem: &MaskedProblem) -> Result<(), AttentionError> {
        let p = &problem.attention;
        let (size, kv) = (p.element.size(), p.kv_shape());
        let strided = Layout::Strided;
        check_tensor(TensorName::Query, &self.q, &p.q_shape(), size, strided)?;
        check_tensor(TensorName::Key, &self.k, &kv, size, strided)?;
        check_tensor(TensorName::Value, &self.v, &kv, size, strided)?;
        match (&self.plan, &problem.plan) {
            (Some(plan), Some(geometry)) => plan.check(geometry)?,
            (None, None) => {}
            (plan, geometry) => {
                let needed = geometry.map(|plan| plan.bits_shape().iter().product());
                let actual = plan.as_ref().map(|plan| &plan.bits);
                return Err(mismatch(TensorName::Plan, needed, actual));
            }
        }
        match (&self.bias, &problem.bias) {
            (Some(bias), Some(shape)) => {
                check_tensor(TensorName::Bias, bias, shape, 4, Layout::Broadcast)
            }
            (None, None) => Ok(()),
            (bias, shape) => {
                let needed = shape.map(|shape| shape.iter().product());
                Err(mismatch(TensorName::Bias, needed, bias.as_ref()))
            }
        }
    }
}

/// The error for a tensor that the problem has and the call has not, or vice versa.
fn mismatch(
    tensor: TensorName,
    needed: Option<usize>,
    actual: Option<&TensorBinding>,
) -> AttentionError {
    AttentionError::Buffer {
        tensor,
        needed: needed.unwrap_or(0),
        actual: actual.map_or(0, |actual| actual.shape.iter().product()),
    }
}

impl MaskedGradients {
    pub(crate) fn check(&self, problem: &MaskedProblem) -> Result<(), AttentionError> {
        let p = &problem.attention;
        let (size, kv, contiguous) = (p.element.size(), p.kv_shape(), Layout::Contiguous);
        let q = p.q_shape();
        check_tensor(TensorName::GradQuery, &self.q, &q, size, contiguous)?;
        check_tensor(TensorName::GradKey, &self.k, &kv, size, contiguous)?;
        check_tensor(TensorName::GradValue, &self.v, &kv, size, contiguous)?;
        match (&self.bias, &problem.bias) {
            (Some(bias), Some(shape)) => {
                check_tensor(TensorName::GradBias, bias, shape, 4, contiguous)
            }
            (Some(_), None) => Err(AttentionError::BiasGradient),
            (None, _) => Ok(()),
        }
    }
}
