//! RMS norm of rows, and of the heads of q and k together with their rotary encoding.

use crate::fallback::norm as fallback;
use crate::types::{NormGrads, Normed, OptionalFloat};
#[cfg(feature = "fusion")]
use crate::types::{NormGradsMetadata, NormedMetadata, OptionalFloatMetadata};
#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
use flash_dma_problem::NormProblem;

/// Steps of a layer before its attention: norms and rotary encoding, each a pass over memory.
///
/// Most users want [`rms_norm`](crate::rms_norm()) and [`HeadEncoding`](crate::HeadEncoding), which validate. The
/// default bodies are plain Burn operations: a backend without an engine needs only `impl NormOps for MyBackend {}`.
/// Arithmetic is f32, and the gradient of gamma is summed in two stages and in a fixed order.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait NormOps: Backend {
    /// `x / sqrt(mean of x² over the last axis + epsilon) * gamma`, in the shape and the type of `x`: `x` is
    /// `[.., width]`, `gamma` `[width]`, the problem of [`NormProblem::rows`].
    #[fusion(dtype = x, shape = x)]
    fn rms_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        problem: NormProblem,
    ) -> FloatTensor<Self> {
        fallback::rms_norm::<Self>(x, gamma, problem)
    }

    /// `x` and its [`rms_norm`](Self::rms_norm), for a block whose output is added to its input. Autodiff adds the gradients of
    /// both in one pass.
    #[fusion(default)]
    fn rms_norm_branch(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        problem: NormProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        (x.clone(), Self::rms_norm(x, gamma, problem))
    }

    /// Gradients of `x` and `gamma` from that of the result. First order only: autodiff panics with the text of
    /// [`AttentionError::SecondOrder`](crate::AttentionError::SecondOrder) if it tracks an input or the gradient.
    #[fusion(meta = |x, gamma, _grad_out, _problem| (x.clone(), gamma.clone()))]
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        grad_out: FloatTensor<Self>,
        problem: NormProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        fallback::rms_norm_backward::<Self>(x, gamma, grad_out, problem)
    }

    /// [`rms_norm_backward`](Self::rms_norm_backward) with the gradient of `x` added to `other`, which has its shape and type.
    #[fusion(meta = |x, gamma, _grad_out, _other, _problem| (x.clone(), gamma.clone()))]
    fn rms_norm_backward_onto(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        grad_out: FloatTensor<Self>,
        other: FloatTensor<Self>,
        problem: NormProblem,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (x, gamma) = Self::rms_norm_backward(x, gamma, grad_out, problem);
        (Self::float_add(x, other), gamma)
    }

    /// Normalises and rotates heads: `x` is `[batch, len, heads, head_dim]`, the result `[batch, heads, len,
    /// head_dim]` in the type of `x` and in any memory layout. `gamma` is `[head_dim]`, present exactly if the
    /// problem has a norm; `table`, `[positions, head_dim, 2]` in f32, holds cosine and sine of each feature's angle
    /// (equal for a pair of neighbours) and is present exactly if it has rotary encoding. The problem is that of
    /// [`NormProblem::heads`]; the table is a constant under autodiff.
    #[fusion(dtype = x, shape = problem.out_shape().into())]
    fn encode_heads(
        x: FloatTensor<Self>,
        #[extension_type] gamma: OptionalFloat<Self>,
        #[extension_type] table: OptionalFloat<Self>,
        problem: NormProblem,
    ) -> FloatTensor<Self> {
        fallback::encode_heads::<Self>(x, gamma, table, problem)
    }

    /// Gradients of `x`, in its shape, and of `gamma`, from that of the result. First order only, like
    /// [`rms_norm_backward`](Self::rms_norm_backward).
    #[fusion(meta = |grad_out, normed, _table, problem| NormGradsMetadata {
        x: TensorSpec::new(problem.x_shape().into(), grad_out.dtype),
        gamma: match normed {
            NormedMetadata::None => OptionalFloatMetadata::None,
            NormedMetadata::Some { gamma, .. } => OptionalFloatMetadata::Some(gamma.clone()),
        },
    })]
    fn encode_heads_backward(
        grad_out: FloatTensor<Self>,
        #[extension_type] normed: Normed<Self>,
        #[extension_type] table: OptionalFloat<Self>,
        problem: NormProblem,
    ) -> NormGrads<Self> {
        fallback::encode_heads_backward::<Self>(grad_out, normed, table, problem)
    }
}
