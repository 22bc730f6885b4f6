//! Attention under a mask and a bias.

#[cfg(feature = "fusion")]
use super::attention::forwarded;
use crate::types::{Forwarded, MaskedGrads, Masking, PlanTensors, Saved, Wanted};
#[cfg(feature = "fusion")]
use crate::types::{MaskedGradsMetadata, OptionalFloatMetadata, PlanTensorsMetadata};
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
    /// Tile plan of a mask in the geometry's shape, whose `true` hides a key if `hidden` and shows it otherwise.
    #[fusion(meta = |_mask, _hidden, geometry| plan(geometry))]
    fn masked_attention_plan(
        mask: BoolTensor<Self>,
        hidden: bool,
        geometry: PlanGeometry,
    ) -> PlanTensors<Self>;

    /// Tile plan of the geometry's mask that shows query `i` the keys `first <= j < end`. Both are i32 `[batch,
    /// heads, q_len | 1, 1]`, the shape of the geometry's mask (which has all keys) with a single key.
    #[fusion(meta = |_first, _end, geometry| plan(geometry))]
    fn masked_attention_plan_ranges(
        first: IntTensor<Self>,
        end: IntTensor<Self>,
        geometry: PlanGeometry,
    ) -> PlanTensors<Self>;

    /// Attention over the keys that the mask shows.
    #[fusion(meta = |q, _k, _v, _masking, problem, wanted| {
        forwarded(q, &problem.attention, *wanted)
    })]
    fn masked_attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] masking: Masking<Self>,
        problem: MaskedProblem,
        wanted: Wanted,
    ) -> Forwarded<Self>;

    /// Gradients of the inputs; of the bias only if `bias_gradient`. Under autodiff a tracked input or gradient
    /// panics with the text of [`AttentionError::SecondOrder`](crate::AttentionError::SecondOrder).
    #[fusion(meta = |q, k, v, _masking, _saved, problem, bias_gradient| MaskedGradsMetadata {
        q: q.clone(),
        k: k.clone(),
        v: v.clone(),
        bias: match problem.bias.filter(|_| *bias_gradient) {
            None => OptionalFloatMetadata::None,
            Some(shape) => OptionalFloatMetadata::Some(TensorSpec::new(shape.into(), DType::F32)),
        },
    })]
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

#[cfg(feature = "fusion")]
fn plan(geometry: &PlanGeometry) -> PlanTensorsMetadata {
    PlanTensorsMetadata {
        bits: TensorSpec::new(geometry.bits_shape().into(), DType::I32),
        counts: TensorSpec::new(geometry.counts_shape().into(), DType::I32),
    }
}
