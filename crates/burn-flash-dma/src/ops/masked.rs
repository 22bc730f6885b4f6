//! Attention under a mask and a bias.

use super::types::{Forwarded, MaskedGrads, Masking, PlanTensors, Saved};
#[cfg(feature = "fusion")]
use super::types::{
    ForwardedMetadata, MaskedGradsMetadata, MaskingMetadata, OptionalFloatMetadata,
    PlanTensorsMetadata, SavedMetadata,
};
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "fusion")]
use burn::{backend::fusion::custom::TensorSpec, tensor::DType};
use flash_dma_problem::{MaskedProblem, PlanGeometry};

/// Tile plans, forward and backward of attention under a mask and a bias.
///
/// Most users want [`MaskedAttention`](crate::MaskedAttention): it validates, and these operations rely on it.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait MaskedAttentionOps: Backend {
    /// The tile plan of a mask in the geometry's shape, whose `true` hides a key if `hidden` and shows it otherwise.
    #[fusion(meta = plan_meta)]
    fn masked_attention_plan(
        mask: BoolTensor<Self>,
        hidden: bool,
        geometry: PlanGeometry,
    ) -> PlanTensors<Self>;

    /// The tile plan of the mask of a geometry that shows query `i` the keys `first <= j < end`, both i32
    /// `[batch, heads, q_len | 1, 1]`: the geometry's mask, which has all keys, with one.
    #[fusion(meta = plan_ranges_meta)]
    fn masked_attention_plan_ranges(
        first: IntTensor<Self>,
        end: IntTensor<Self>,
        geometry: PlanGeometry,
    ) -> PlanTensors<Self>;

    /// `out` `[batch, q_heads, q_len, head_dim]` in the type of `q` and `lse` `[batch, q_heads, q_len]` in
    /// f32. Under autodiff `lse` is a constant.
    #[fusion(meta = forward_meta)]
    fn masked_attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] masking: Masking<Self>,
        problem: MaskedProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The same as [`masked_attention_forward`](Self::masked_attention_forward), the residual of `out` and the rest of
    /// `lse`: what a backward pass is to get, which autodiff therefore calls. Under autodiff itself every result is a constant.
    #[fusion(meta = forward_with_residual_meta)]
    fn masked_attention_forward_with_residual(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] masking: Masking<Self>,
        problem: MaskedProblem,
    ) -> Forwarded<Self>;

    /// The same as [`masked_attention_forward`](Self::masked_attention_forward), but with an `lse` that is
    /// differentiable under autodiff.
    #[fusion(default)]
    fn masked_attention_forward_with_lse(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] masking: Masking<Self>,
        problem: MaskedProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        Self::masked_attention_forward(q, k, v, masking, problem)
    }

    /// The gradients of the inputs; the bias has one only if `bias_gradient`. First order only: autodiff panics with
    /// the text of [`AttentionError::SecondOrder`](crate::AttentionError::SecondOrder) if it tracks an input or a
    /// gradient.
    #[fusion(meta = backward_meta)]
    fn masked_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] masking: Masking<Self>,
        #[extension_type] saved: Saved<Self>,
        problem: MaskedProblem,
        bias_gradient: bool,
    ) -> MaskedGrads<Self>;
}

// Shapes under fusion are taken from here and never compared with what the engine returns.

#[cfg(feature = "fusion")]
fn plan_meta(_mask: &TensorSpec, _hidden: &bool, geometry: &PlanGeometry) -> PlanTensorsMetadata {
    plan_specs(geometry)
}

#[cfg(feature = "fusion")]
fn plan_ranges_meta(
    _first: &TensorSpec,
    _end: &TensorSpec,
    geometry: &PlanGeometry,
) -> PlanTensorsMetadata {
    plan_specs(geometry)
}

#[cfg(feature = "fusion")]
fn plan_specs(geometry: &PlanGeometry) -> PlanTensorsMetadata {
    PlanTensorsMetadata {
        bits: TensorSpec::new(geometry.bits_shape().into(), DType::I32),
        counts: TensorSpec::new(geometry.counts_shape().into(), DType::I32),
    }
}

#[cfg(feature = "fusion")]
fn forward_meta(
    q: &TensorSpec,
    _k: &TensorSpec,
    _v: &TensorSpec,
    _masking: &MaskingMetadata,
    problem: &MaskedProblem,
) -> (TensorSpec, TensorSpec) {
    let lse = problem.attention.lse_shape();
    (q.clone(), TensorSpec::new(lse.into(), DType::F32))
}

#[cfg(feature = "fusion")]
fn forward_with_residual_meta(
    q: &TensorSpec,
    k: &TensorSpec,
    v: &TensorSpec,
    masking: &MaskingMetadata,
    problem: &MaskedProblem,
) -> ForwardedMetadata {
    let (out, lse) = forward_meta(q, k, v, masking, problem);
    ForwardedMetadata {
        residual: match problem.attention.residual_shape() {
            None => OptionalFloatMetadata::None,
            Some(_) => OptionalFloatMetadata::Some(out.clone()),
        },
        out,
        lse_rest: lse.clone(),
        lse,
    }
}

#[cfg(feature = "fusion")]
fn backward_meta(
    q: &TensorSpec,
    k: &TensorSpec,
    v: &TensorSpec,
    _masking: &MaskingMetadata,
    _saved: &SavedMetadata,
    problem: &MaskedProblem,
    bias_gradient: &bool,
) -> MaskedGradsMetadata {
    MaskedGradsMetadata {
        q: q.clone(),
        k: k.clone(),
        v: v.clone(),
        bias: match problem.bias.filter(|_| *bias_gradient) {
            None => OptionalFloatMetadata::None,
            Some(shape) => OptionalFloatMetadata::Some(TensorSpec::new(shape.into(), DType::F32)),
        },
    }
}
