//! Dynamic-mask attention.

use crate::fallback::sink;
use crate::types::{AttentionGrads, Forwarded, Saved, Selection, Wanted};
#[cfg(feature = "fusion")]
use crate::types::{
    AttentionGradsMetadata, ForwardedMetadata, OptionalFloatMetadata, RankLearningMetadata,
    SelectionMetadata,
};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "fusion")]
use burn::{backend::fusion::custom::TensorSpec, tensor::DType};
use flash_dma_problem::{KeptKeys, Problem};

/// Selection, forward and backward of dynamic-mask attention.
///
/// Most users want [`Attention`](crate::Attention) and the functions at the root of the crate, which validate.
/// `problem` must describe the tensors; otherwise an engine panics with the text of its
/// [`AttentionError`](crate::AttentionError).
///
/// On a backend without an engine the functions return [`AttentionError::NoEngine`](crate::AttentionError::NoEngine)
/// instead.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait DynamicMaskOps: Backend {
    /// The [`Interval`](crate::Interval) of each key if every position keeps the keys of `kept`: scores `[batch,
    /// kv_heads, k_len]` (f32) to i32 `[batch, kv_heads, k_len, 2]`.
    #[fusion(dtype = burn::tensor::DType::I32, shape = {
        let mut shape = scores.clone();
        shape.push(2);
        shape
    })]
    fn dynamic_mask_select(scores: FloatTensor<Self>, kept: KeptKeys) -> IntTensor<Self>;

    /// Attention over the selected keys.
    #[fusion(meta = |q, _k, _v, _selection, problem, wanted| forwarded(q, problem, *wanted))]
    fn dynamic_mask_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] selection: Selection<Self>,
        problem: Problem,
        wanted: Wanted,
    ) -> Forwarded<Self>;

    /// `out` and `lse` of [`dynamic_mask_forward`](Self::dynamic_mask_forward), both differentiable, with one more logit
    /// per query head in the softmax, `logits` `[q_heads]` (f32), that has no value. They and the gains of runners-up
    /// include it.
    #[fusion(default)]
    fn dynamic_mask_forward_with_sink(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        #[extension_type] selection: Selection<Self>,
        problem: Problem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let results = Self::dynamic_mask_forward(q, k, v, selection, problem, Wanted::Saved);
        let Forwarded { out, lse, .. } = sink::with_sink::<Self>(results, logits);
        (out, lse)
    }

    /// Gradients of the inputs. With runners-up also that of the tensor that ranks the keys: the change of the loss
    /// if they were attended, and for kept keys that learn their [worth](crate::OWN_OUTPUT_WEIGHT). Under autodiff,
    /// tracked q, k, v, scores or gradients panic with the text of
    /// [`AttentionError::SecondOrder`](crate::AttentionError::SecondOrder).
    #[fusion(meta = |q, k, v, selection, _saved, problem| gradients([q, k, v], selection, problem))]
    fn dynamic_mask_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        #[extension_type] selection: Selection<Self>,
        #[extension_type] saved: Saved<Self>,
        problem: Problem,
    ) -> AttentionGrads<Self>;
}

#[cfg(feature = "fusion")]
pub(super) fn forwarded(q: &TensorSpec, problem: &Problem, wanted: Wanted) -> ForwardedMetadata {
    let saved = |spec: Option<TensorSpec>| match spec.filter(|_| wanted == Wanted::Saved) {
        None => OptionalFloatMetadata::None,
        Some(spec) => OptionalFloatMetadata::Some(spec),
    };
    let lse = TensorSpec::new(problem.lse_shape().into(), DType::F32);
    ForwardedMetadata {
        out: q.clone(),
        residual: saved(problem.residual_shape().map(|_| q.clone())),
        lse: lse.clone(),
        lse_rest: saved(Some(lse)),
    }
}

#[cfg(feature = "fusion")]
fn gradients(
    [q, k, v]: [&TensorSpec; 3],
    selection: &SelectionMetadata,
    problem: &Problem,
) -> AttentionGradsMetadata {
    AttentionGradsMetadata {
        q: q.clone(),
        k: k.clone(),
        v: v.clone(),
        scores: match selection {
            SelectionMetadata::Scored { scores, .. } if problem.scores_learn => {
                OptionalFloatMetadata::Some(scores.clone())
            }
            _ => OptionalFloatMetadata::None,
        },
        rank: match selection {
            SelectionMetadata::Scored {
                scores,
                learning: RankLearningMetadata::Some { .. },
                ..
            } => OptionalFloatMetadata::Some(scores.clone()),
            _ => OptionalFloatMetadata::None,
        },
    }
}
