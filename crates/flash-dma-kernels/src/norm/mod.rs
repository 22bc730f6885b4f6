//! RMS norm of rows and rotary encoding of heads, fused: one launch forward; backward one launch for the gradient of
//! `x` and a sum over the rows of each cube, and one that adds the cubes' sums up to the gradient of gamma. All
//! arithmetic is f32, every order of additions fixed.
//!
//! | kernel | reads | writes |
//! |---|---|---|
//! | [`norm_forward`](kernel) | `x`, gamma, angles | `out` |
//! | [`norm_backward`](kernel) | `x`, gradient of `out`, gamma, angles | gradient of `x`, a row of sums per cube |
//! | [`gamma_gradient`](sums) | the rows of sums | gradient of gamma |

pub(crate) mod args;
pub(crate) mod blueprint;
pub(crate) mod kernel;
pub(crate) mod launch;
pub(crate) mod sums;
#[cfg(test)]
mod tests;

pub use args::{NormGradients, NormParameters};

use crate::host::check::{Layout, check_tensor, check_type};
use crate::host::range::range;
use crate::norm::launch::Call;
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, NormProblem, TensorName};

/// Normalises and rotates `x`, `[batch, len, heads, width]`, into `out`, `[batch, heads, len, width]`: each of the
/// problem's element type, any strides with a contiguous last axis. Rows of `out` in the memory order of `x` make both
/// accesses contiguous.
///
/// The call only enqueues: a failure on the device is reported when the result is read.
///
/// # Errors
///
/// [`AttentionError`], before any launch, if the device lacks the element type or a shape, stride or buffer does not
/// fit.
pub fn norm_forward(
    client: &Client,
    problem: &NormProblem,
    x: TensorBinding,
    parameters: &NormParameters,
    out: TensorBinding,
) -> Result<(), AttentionError> {
    check_type(client, problem.element)?;
    let (size, strided) = (problem.element.size(), Layout::Strided);
    parameters.check(problem)?;
    check_tensor(TensorName::Tokens, &x, &problem.x_shape(), size, strided)?;
    check_tensor(TensorName::Out, &out, &problem.out_shape(), size, strided)?;
    let _range = range!("norm_forward");
    if !problem.is_empty() {
        let call = Call::new(client, problem, parameters, &[&x, &out]);
        call.forward(x, out, call.blueprint());
    }
    Ok(())
}

/// The gradients of [`norm_forward`], from that of the output, `[batch, heads, len, width]`, any strides with a
/// contiguous last axis. `x` is given exactly if there is a norm: the rotation alone does not need it. That of `x` is added
/// to `other`, if there is one, of its shape.
///
/// The call only enqueues: a failure on the device is reported when a result is read.
///
/// # Errors
///
/// [`AttentionError`], before any launch, if the device lacks the element type or a shape, stride or buffer does not
/// fit.
pub fn norm_backward(
    client: &Client,
    problem: &NormProblem,
    x: Option<TensorBinding>,
    parameters: &NormParameters,
    grad_out: TensorBinding,
    other: Option<TensorBinding>,
    grads: NormGradients,
) -> Result<(), AttentionError> {
    check_type(client, problem.element)?;
    let (size, strided) = (problem.element.size(), Layout::Strided);
    let (x_shape, out_shape) = (problem.x_shape(), problem.out_shape());
    parameters.check(problem)?;
    let normed = problem.epsilon.map(|_| x_shape);
    check_given(TensorName::Tokens, &x, normed, size, strided)?;
    check_tensor(TensorName::GradOut, &grad_out, &out_shape, size, strided)?;
    for grad_x in other.iter().chain([&grads.x]) {
        check_tensor(TensorName::GradTokens, grad_x, &x_shape, size, strided)?;
    }
    check_gamma(TensorName::GradNormWeight, &grads.gamma, problem)?;
    let _range = range!("norm_backward");
    let typed = [&grad_out, &grads.x].into_iter().chain(&x).chain(&other);
    let typed: Vec<_> = typed.collect();
    let call = Call::new(client, problem, parameters, &typed);
    call.backward(x, grad_out, other, grads, call.blueprint());
    Ok(())
}

impl NormParameters {
    fn check(&self, problem: &NormProblem) -> Result<(), AttentionError> {
        check_gamma(TensorName::NormWeight, &self.gamma, problem)?;
        let (name, shape) = (TensorName::RotaryTable, problem.table_shape());
        check_given(name, &self.table, shape, 4, Layout::Strided)
    }
}

fn check_gamma(
    name: TensorName,
    gamma: &Option<TensorBinding>,
    problem: &NormProblem,
) -> Result<(), AttentionError> {
    let size = problem.gamma.size();
    let shape = problem.epsilon.map(|_| [problem.width]);
    check_given(name, gamma, shape, size, Layout::Contiguous)
}

/// [`check_tensor`] for a tensor that is given exactly if it has a shape.
fn check_given<const R: usize>(
    name: TensorName,
    tensor: &Option<TensorBinding>,
    shape: Option<[usize; R]>,
    size: usize,
    layout: Layout,
) -> Result<(), AttentionError> {
    match (tensor, shape) {
        (Some(tensor), Some(shape)) => check_tensor(name, tensor, &shape, size, layout),
        (None, None) => Ok(()),
        _ => Err(AttentionError::NormOperand { tensor: name }),
    }
}
