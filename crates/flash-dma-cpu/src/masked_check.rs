//! The checks of a masked call, before anything is computed or written.

use crate::check::{buffer, view as row_view};
use crate::masked_args::{BroadcastView, MaskedGradients, MaskedInputs};
use crate::{AttentionError, Element, MaskedProblem};
use flash_dma_problem::{TensorName, TensorSpec};

/// Checks the shape and the reach of a view; its strides are free.
pub(crate) fn view<T>(
    name: TensorName,
    view: &BroadcastView<'_, T>,
    expected: &[usize; 4],
) -> Result<(), AttentionError> {
    for (axis, (&actual, &expected)) in view.shape.iter().zip(expected).enumerate() {
        if actual != expected {
            return Err(AttentionError::Shape {
                tensor: name,
                axis,
                expected,
                actual,
            });
        }
    }
    let spec = TensorSpec {
        name,
        shape: &view.shape,
        strides: &view.strides,
    };
    let needed = spec.required_len().unwrap_or(usize::MAX);
    if view.data.len() < needed {
        return Err(AttentionError::Buffer {
            tensor: name,
            needed,
            actual: view.data.len(),
        });
    }
    Ok(())
}

pub(crate) fn inputs<E: Element>(
    problem: &MaskedProblem,
    inputs: &MaskedInputs<'_, E>,
) -> Result<(), AttentionError> {
    let p = &problem.attention;
    if p.element != E::TYPE {
        return Err(AttentionError::element_type(
            TensorName::Query,
            p.element,
            E::TYPE,
        ));
    }
    row_view(TensorName::Query, &inputs.q, &p.q_shape())?;
    row_view(TensorName::Key, &inputs.k, &p.kv_shape())?;
    row_view(TensorName::Value, &inputs.v, &p.kv_shape())?;
    let no_mask: &[u32] = &[];
    let shape = problem.plan.as_ref().map(|plan| plan.bits_shape());
    let shape: &[usize] = shape.as_ref().map_or(&[0], |shape| shape);
    buffer(TensorName::Plan, inputs.bits.unwrap_or(no_mask), shape)?;
    match (&inputs.bias, &problem.bias) {
        (Some(bias), Some(shape)) => view(TensorName::Bias, bias, shape),
        (None, None) => Ok(()),
        (bias, shape) => Err(AttentionError::Buffer {
            tensor: TensorName::Bias,
            needed: shape.map_or(0, |shape| shape.iter().product()),
            actual: bias.map_or(0, |bias| bias.data.len()),
        }),
    }
}

pub(crate) fn gradients<E: Element>(
    problem: &MaskedProblem,
    grads: &MaskedGradients<'_, E>,
) -> Result<(), AttentionError> {
    let p = &problem.attention;
    buffer(TensorName::GradQuery, grads.q, &p.q_shape())?;
    buffer(TensorName::GradKey, grads.k, &p.kv_shape())?;
    buffer(TensorName::GradValue, grads.v, &p.kv_shape())?;
    match (&grads.bias, &problem.bias) {
        (Some(bias), Some(shape)) => buffer(TensorName::GradBias, bias, shape),
        (Some(_), None) => Err(AttentionError::BiasGradient),
        (None, _) => Ok(()),
    }
}
