//! The tensors of a call. Inputs may have any strides with a contiguous last axis; outputs are contiguous and
//! overwritten, those of the forward pass with heads and tokens in either order.

use crate::dropout::{DropoutArg, dropout};
use cubecl::prelude::*;
use flash_dma_problem::{Problem, tensors};

/// The inputs of attention: rows of the problem's element type, scores in f32, and 32-bit integers, which are contiguous.
pub type Inputs = tensors::Inputs<TensorBinding>;

/// The scores that select and bias the keys, and the intervals that [`select`](crate::select()) made of them.
pub type Selection = tensors::Selection<TensorBinding>;

/// The pairs by which the tensor that ranks the keys learns, 32-bit integers.
pub type RankLearning = tensors::RankLearning<TensorBinding>;

/// The outputs of the forward pass. `out` is contiguous, or has a token's heads together, as contiguous
/// `[batch, q_len, q_heads, head_dim]` seen with its middle axes swapped; `residual` has its order.
pub type Outputs = tensors::Outputs<TensorBinding>;

/// The results of the forward pass that the backward pass needs, and the incoming gradients.
pub type Saved = tensors::Saved<TensorBinding>;

/// The outputs of the backward pass.
pub type Gradients = tensors::Gradients<TensorBinding>;

/// The numbers that turn products into logits, and probabilities into weights.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Scaling {
    pub scale: f32,
    /// Not read without a softcap.
    pub softcap: f32,
    /// Given exactly if a tensor-core kernel's blueprint has dropout. The portable kernels take it separately.
    pub dropout: DropoutArg,
}

pub(crate) fn scaling(scale: f32, softcap: Option<f32>) -> ScalingLaunch {
    ScalingLaunch::new(scale, softcap.unwrap_or(1.0), None.into())
}

/// The launch argument of a problem's scale, softcap and dropout.
pub(crate) fn scaling_and_dropout(problem: &Problem) -> ScalingLaunch {
    let softcap = problem.softcap.unwrap_or(1.0);
    ScalingLaunch::new(problem.scale, softcap, dropout(problem).into())
}
