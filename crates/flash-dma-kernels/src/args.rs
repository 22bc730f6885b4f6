//! The tensors of a call. Inputs may have any strides with a contiguous last axis; outputs are contiguous and
//! overwritten, those of the forward pass with heads and tokens in either order.

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
    /// The pairs that train the rank; `None` if nothing learns it. Only the backward pass reads it.
    pub far: Option<Far>,
}

/// The pairs that train the tensor by which keys are ranked.
#[derive(Clone, Debug)]
pub struct Far {
    /// One past the last position at which each key is a runner-up, which it is from the end of its interval on:
    /// contiguous `[batch, kv_heads, k_len]`, 32-bit integers.
    pub ends: TensorBinding,
    /// The most keys of a head that one position would attend to if the intervals ended there: the window and its
    /// runners-up. The lists have room for no more, so a number that is too small loses gradients.
    pub max_live: usize,
    /// The first position at which each key is kept for its rank, not before the key itself; a position from the end of
    /// the key's interval on means that it never is. Contiguous `[batch, kv_heads, k_len]`, 32-bit integers. `None`
    /// unless kept keys learn.
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
    /// The rounding error of `out`, rounded to 16 bits, for [`Saved::residual`]; shape and order of `out`, 0 where
    /// `out` is not finite. `None` does not compute it; f32 has none.
    pub residual: Option<TensorBinding>,
    /// `[batch, q_heads, q_len]`, f32: the natural logarithm of the sum of the exponentials of a query's logits.
    pub lse: TensorBinding,
    /// The rounding error of `lse`, for [`Saved::lse_rest`]; shape of `lse`, 0 where it is not finite. `None` skips it.
    pub lse_rest: Option<TensorBinding>,
}

impl Outputs {
    /// The outputs without the rounding errors that a backward pass reads.
    #[must_use]
    pub fn new(out: TensorBinding, lse: TensorBinding) -> Self {
        Self {
            out,
            residual: None,
            lse,
            lse_rest: None,
        }
    }

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
    /// The residual that the forward pass wrote, shaped as `out`. `None` is zero: then the gradients of logits, and
    /// with them those of scores and biases, include the rounding of `out`, which adds up over the queries of a key.
    pub residual: Option<TensorBinding>,
    /// Contiguous `[batch, q_heads, q_len]`, f32.
    pub lse: TensorBinding,
    /// The rounding error of `lse` that the forward pass wrote, shaped as `lse`. `None` is zero: then the probabilities
    /// of a row have a factor of up to `exp(ulp(lse) / 2)`, 3e-5 off at an LSE of 1000 and e³² at 1e9.
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
    /// `[batch, kv_heads, k_len]`, f32: the gradient of the rank; given exactly if there is a [`Far`].
    pub rank: Option<TensorBinding>,
}

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
