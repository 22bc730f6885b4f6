//! Every check of a call, before anything is computed or written.

use crate::{AttentionError, Element, Gradients, Inputs, Problem, Saved, View};
use flash_dma_problem::{TensorName, TensorSpec};

/// Checks the shape, the strides and the reach of a view.
pub(crate) fn view<E, const R: usize>(
    name: TensorName,
    view: &View<'_, E, R>,
    expected: &[usize; R],
) -> Result<(), AttentionError> {
    let spec = TensorSpec {
        name,
        shape: &view.shape,
        strides: &view.strides,
    };
    spec.check(expected)?;
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

/// Checks that a contiguous buffer holds exactly the elements of `shape`.
pub(crate) fn buffer<T>(
    name: TensorName,
    buffer: &[T],
    shape: &[usize],
) -> Result<(), AttentionError> {
    let needed = shape
        .iter()
        .try_fold(1usize, |size, &n| size.checked_mul(n))
        .unwrap_or(usize::MAX);
    if buffer.len() != needed {
        return Err(AttentionError::Buffer {
            tensor: name,
            needed,
            actual: buffer.len(),
        });
    }
    Ok(())
}

/// Checks the inputs against the problem.
pub(crate) fn inputs<E: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, E>,
) -> Result<(), AttentionError> {
    if problem.element != E::TYPE {
        return Err(AttentionError::element_type(
            TensorName::Query,
            problem.element,
            E::TYPE,
        ));
    }
    view(TensorName::Query, &inputs.q, &problem.q_shape())?;
    view(TensorName::Key, &inputs.k, &problem.kv_shape())?;
    view(TensorName::Value, &inputs.v, &problem.kv_shape())?;
    match &inputs.selection {
        None if problem.has_scores => Err(AttentionError::ScoresWithoutIntervals),
        Some(_) if !problem.has_scores => Err(AttentionError::ScoresWithoutIntervals),
        None => Ok(()),
        Some(selection) => {
            view(
                TensorName::Scores,
                &selection.scores,
                &problem.scores_shape(),
            )?;
            buffer(
                TensorName::Intervals,
                selection.intervals,
                &problem.scores_shape(),
            )
        }
    }
}

/// Checks what the forward pass left and the incoming gradients.
pub(crate) fn saved<E: Element>(
    problem: &Problem,
    saved: &Saved<'_, E>,
) -> Result<(), AttentionError> {
    view(TensorName::Out, &saved.out, &problem.q_shape())?;
    buffer(TensorName::Lse, saved.lse, &problem.lse_shape())?;
    view(TensorName::GradOut, &saved.grad_out, &problem.q_shape())?;
    match saved.grad_lse {
        Some(grad_lse) => buffer(TensorName::GradLse, grad_lse, &problem.lse_shape()),
        None => Ok(()),
    }
}

/// Checks where the backward pass writes.
pub(crate) fn gradients<E: Element>(
    problem: &Problem,
    grads: &Gradients<'_, E>,
) -> Result<(), AttentionError> {
    buffer(TensorName::GradQuery, grads.q, &problem.q_shape())?;
    buffer(TensorName::GradKey, grads.k, &problem.kv_shape())?;
    buffer(TensorName::GradValue, grads.v, &problem.kv_shape())?;
    match &grads.scores {
        Some(scores) if problem.has_scores => {
            buffer(TensorName::GradScores, scores, &problem.scores_shape())
        }
        None if !problem.has_scores => Ok(()),
        _ => Err(AttentionError::ScoresGradient),
    }
}
