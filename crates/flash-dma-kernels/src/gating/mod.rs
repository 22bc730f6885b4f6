//! SwiGLU without its products, each direction in one pass.

mod kernel;
#[cfg(test)]
mod tests;

use crate::host::check::{Layout, check_tensor, check_type, elem_type};
use crate::host::flat::Pass;
use crate::host::range::range;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, ElementType, TensorName};
use kernel::{swiglu_backward_kernel, swiglu_kernel};

/// `out = silu(gate) * up`, element by element; all contiguous, of one shape and of `element`. Arithmetic is f32, rounded
/// once.
///
/// The call only enqueues: a failure on the device is reported when the result is read.
///
/// # Errors
///
/// [`AttentionError`], before any launch, if the device lacks the element type or a shape, stride or buffer does not fit.
pub fn swiglu(
    client: &Client,
    element: ElementType,
    gate: &TensorBinding,
    up: &TensorBinding,
    out: &TensorBinding,
) -> Result<(), AttentionError> {
    check_type(client, element)?;
    check(
        element,
        [
            (TensorName::Gate, gate),
            (TensorName::Up, up),
            (TensorName::Out, out),
        ],
    )?;
    let _range = range!("swiglu");
    let Some(pass) = Pass::new(client, element, &[gate, up, out]) else {
        return Ok(());
    };
    let (cubes, dim) = pass.cubes(client);
    // SAFETY: every buffer was checked to hold the elements, and units past the last do nothing.
    unsafe {
        swiglu_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            pass.address,
            pass.vector,
            gate.clone().into_buffer_arg(),
            up.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            pass.items,
            elem_type(element),
        );
    }
    Ok(())
}

/// Where the gradients of [`swiglu`] go.
#[derive(Clone, Copy, Debug)]
pub enum SwigluGradients<'a> {
    /// Over the gate and `up`; with `again` the result is computed once more, over its gradient.
    InPlace {
        /// Computes the result.
        again: bool,
    },
    /// To other buffers, of the same shape and type.
    New {
        /// For the gradient of the gate.
        gate: &'a TensorBinding,
        /// For the gradient of `up`.
        up: &'a TensorBinding,
        /// For the result, which is not computed without.
        out: Option<&'a TensorBinding>,
    },
}

/// The gradients of [`swiglu`] from that of its result; all as there.
///
/// # Errors
///
/// As [`swiglu`].
pub fn swiglu_backward(
    client: &Client,
    element: ElementType,
    gate: &TensorBinding,
    up: &TensorBinding,
    grad_out: &TensorBinding,
    grads: SwigluGradients<'_>,
) -> Result<(), AttentionError> {
    check_type(client, element)?;
    let mut tensors = vec![
        (TensorName::Gate, gate),
        (TensorName::Up, up),
        (TensorName::GradOut, grad_out),
    ];
    if let SwigluGradients::New { gate, up, out } = grads {
        tensors.extend([(TensorName::GradGate, gate), (TensorName::GradUp, up)]);
        tensors.extend(out.map(|out| (TensorName::Out, out)));
    }
    check(element, tensors.iter().copied())?;
    let _range = range!("swiglu_backward");
    let tensors: Vec<_> = tensors.into_iter().map(|(_, tensor)| tensor).collect();
    let Some(pass) = Pass::new(client, element, &tensors) else {
        return Ok(());
    };
    let argument = |tensor: &TensorBinding| tensor.clone().into_buffer_arg();
    let over = |at| BufferArg::alias(at, gate.shape.iter().product());
    let (grad_gate, grad_up, out, in_place) = match grads {
        SwigluGradients::InPlace { again } => (over(0), over(1), again.then(|| over(2)), true),
        SwigluGradients::New { gate, up, out } => {
            (argument(gate), argument(up), out.map(argument), false)
        }
    };
    let again = out.is_some();
    let (cubes, dim) = pass.cubes(client);
    // SAFETY: every buffer was checked to hold the elements, and units past the last do nothing.
    unsafe {
        swiglu_backward_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            pass.address,
            pass.vector,
            argument(gate),
            argument(up),
            argument(grad_out),
            grad_gate,
            grad_up,
            out.into(),
            pass.items,
            again,
            in_place,
            elem_type(element),
        );
    }
    Ok(())
}

/// Checks that all tensors are contiguous and of the shape of the first.
fn check<'a>(
    element: ElementType,
    tensors: impl IntoIterator<Item = (TensorName, &'a TensorBinding)>,
) -> Result<(), AttentionError> {
    let mut tensors = tensors.into_iter().peekable();
    let shape = tensors.peek().expect("a tensor").1.shape.to_vec();
    for (name, tensor) in tensors {
        check_tensor(name, tensor, &shape, element.size(), Layout::Contiguous)?;
    }
    Ok(())
}
