//! The tensors of a call. Inputs may have any strides with a contiguous last axis; outputs are
//! contiguous and overwritten, those of the forward pass in either order of heads and tokens.

use crate::dropout::{DropoutArg, dropout};
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// The scores that select and bias the keys.
#[derive(Clone, Debug)]
pub struct Selection {
    /// `[batch, kv_heads, k_len]`, f32.
    pub scores: TensorBinding,
    /// The result of [`select`](crate::select()) on the scores: contiguous `[batch, kv_heads, k_len, 2]`, 32-bit
    /// integers, first and end of each key's [`Interval`](flash_dma_problem::Interval). Any other intervals serve, too,
    /// if each begins at its key and ends by `k_len`, and at most `problem.window` of a head hold any one position.
    pub intervals: TensorBinding,
    /// `None` if nothing learns what it ranks the keys by; only the backward pass reads it.
    pub far: Option<Far>,
}

/// The pairs by which the tensor that ranks the keys learns.
#[derive(Clone, Debug)]
pub struct Far {
    /// One past the last position at which each key is a runner-up, contiguous `[batch, kv_heads, k_len]`, 32-bit
    /// integers: it is one from the end of its interval on.
    pub ends: TensorBinding,
    /// The most keys of a head that one position would attend to if the intervals ended there: the window and its
    /// runners-up. The lists have room for no more, so a number that is too small loses gradients.
    pub max_live: usize,
    /// If kept keys learn what they are worth: the first position at which its rank keeps each key, not before the key
    /// itself, contiguous `[batch, kv_heads, k_len]`, 32-bit integers; one from the end of its interval on is none.
    pub left_out: Option<TensorBinding>,
}

/// The inputs of attention, shaped as the problem says.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// `[batch, q_heads, q_len, head_dim]`, the problem's element type.
    pub q: TensorBinding,
    /// `[batch, kv_heads, k_len, head_dim]`, the problem's element type.
    pub k: TensorBinding,
    /// `[batch, kv_heads, k_len, head_dim]`, the problem's element type.
    pub v: TensorBinding,
    /// `None` for plain attention.
    pub selection: Option<Selection>,
}

/// The outputs of the forward pass.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// `[batch, q_heads, q_len, head_dim]`, the problem's element type: contiguous, or a token's heads together as
    /// contiguous `[batch, q_len, q_heads, head_dim]` seen with its middle axes swapped.
    pub out: TensorBinding,
    /// As `out`, and in its order: what its rounding to 16 bits loses, rounded to 16 bits, for [`Saved::residual`]; 0
    /// where `out` is not finite. `None` does not compute it; f32 has none.
    pub residual: Option<TensorBinding>,
    /// `[batch, q_heads, q_len]`, f32: the natural logarithm of the sum of the exponentials of a query's logits.
    pub lse: TensorBinding,
    /// As `lse`: what its rounding loses, for [`Saved::lse_rest`]; 0 where `lse` is not finite. `None` skips it.
    pub lse_rest: Option<TensorBinding>,
}

impl Outputs {
    /// Without what a backward pass needs.
    #[must_use]
    pub fn new(out: TensorBinding, lse: TensorBinding) -> Self {
        Self {
            out,
            residual: None,
            lse,
            lse_rest: None,
        }
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<&TensorBinding> {
        let tensors = [&self.out, &self.lse];
        let optional = self.residual.iter().chain(&self.lse_rest);
        tensors.into_iter().chain(optional).collect()
    }
}

/// The results of the forward pass that the backward pass needs, and the incoming gradients.
#[derive(Clone, Debug)]
pub struct Saved {
    /// `[batch, q_heads, q_len, head_dim]`, the problem's element type.
    pub out: TensorBinding,
    /// As `out`: what the forward pass left beside it. `None` is zero: then the gradients of logits, and with them
    /// those of scores and biases, have the rounding of `out` in them, which adds up over the queries of a key.
    pub residual: Option<TensorBinding>,
    /// Contiguous `[batch, q_heads, q_len]`, f32.
    pub lse: TensorBinding,
    /// As `lse`: what the forward pass left beside it. `None` is zero: then the probabilities of a row have a factor of
    /// up to `exp(ulp(lse) / 2)`, 3e-5 off at an LSE of 1000 and e³² at 1e9.
    pub lse_rest: Option<TensorBinding>,
    /// `[batch, q_heads, q_len, head_dim]`, the problem's element type.
    pub grad_out: TensorBinding,
    /// Contiguous `[batch, q_heads, q_len]`, f32; `None` is zero.
    pub grad_lse: Option<TensorBinding>,
}

impl Saved {
    /// The tensors of the problem's element type.
    pub(crate) fn typed(&self) -> Vec<&TensorBinding> {
        let tensors = [&self.out, &self.grad_out];
        tensors.into_iter().chain(&self.residual).collect()
    }
}

/// The outputs of the backward pass.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[batch, q_heads, q_len, head_dim]`, the problem's element type.
    pub q: TensorBinding,
    /// `[batch, kv_heads, k_len, head_dim]`, the problem's element type.
    pub k: TensorBinding,
    /// `[batch, kv_heads, k_len, head_dim]`, the problem's element type.
    pub v: TensorBinding,
    /// `[batch, kv_heads, k_len]`, f32; given exactly if the problem has scores.
    pub scores: Option<TensorBinding>,
    /// `[batch, kv_heads, k_len]`, f32: the gradient of what ranks the keys; given exactly if there is a [`Far`].
    pub rank: Option<TensorBinding>,
}

/// From products to logits, and from probabilities to weights.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Scaling {
    pub scale: f32,
    /// Not read without a softcap.
    pub softcap: f32,
    /// Given exactly if the blueprint of a tensor-core kernel has dropout. The portable kernels take it apart.
    pub dropout: DropoutArg,
}

/// The launch argument of a problem's scale and softcap.
pub(crate) fn scaling(scale: f32, softcap: Option<f32>) -> ScalingLaunch {
    ScalingLaunch::new(scale, softcap.unwrap_or(1.0), None.into())
}

/// The same with a problem's dropout.
pub(crate) fn scaling_and_dropout(problem: &Problem) -> ScalingLaunch {
    let softcap = problem.softcap.unwrap_or(1.0);
    ScalingLaunch::new(problem.scale, softcap, dropout(problem).into())
}
