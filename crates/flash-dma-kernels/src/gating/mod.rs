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

/// The gradients of [`swiglu`], `grads` of gate and up, from that of its result; all as there.
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
    [grad_gate, grad_up]: [&TensorBinding; 2],
) -> Result<(), AttentionError> {
    check_type(client, element)?;
    let tensors = [gate, up, grad_out, grad_gate, grad_up];
    let names = [
        TensorName::Gate,
        TensorName::Up,
        TensorName::GradOut,
        TensorName::GradGate,
        TensorName::GradUp,
    ];
    check(element, names.into_iter().zip(tensors))?;
    let _range = range!("swiglu_backward");
    let Some(pass) = Pass::new(client, element, &tensors) else {
        return Ok(());
    };
    let (cubes, dim) = pass.cubes(client);
    // SAFETY: every buffer was checked to hold the elements, and units past the last do nothing.
    unsafe {
        swiglu_backward_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            pass.address,
            pass.vector,
            gate.clone().into_buffer_arg(),
            up.clone().into_buffer_arg(),
            grad_out.clone().into_buffer_arg(),
            grad_gate.clone().into_buffer_arg(),
            grad_up.clone().into_buffer_arg(),
            pass.items,
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
