//! Every check of a call of the two operations, before anything is computed or written.

use crate::args::{Gradients, Inputs, MaskedGradients, MaskedInputs, Outputs, Saved};
use crate::element::Element;
use crate::view::{BroadcastView, View};
use flash_dma_problem::{
    AttentionError, Engine, EngineChoice, Interval, KeptKeys, MaskedProblem, Obstacle, PassKind,
    PlanGeometry, Problem, TensorName, TensorSpec,
};

pub(crate) type Checked = Result<(), AttentionError>;

/// Checks the shape, the strides and the reach of a view.
pub(crate) fn view<E, const R: usize>(
    name: TensorName,
    view: &View<'_, E, R>,
    expected: &[usize; R],
) -> Checked {
    let spec = TensorSpec {
        name,
        shape: &view.shape,
        strides: &view.strides,
    };
    spec.check(expected)?;
    reach(&spec, view.data.len())
}

/// Checks the shape and the reach of a view; its strides are free.
pub(crate) fn broadcast_view<T>(
    name: TensorName,
    view: &BroadcastView<'_, T>,
    expected: &[usize; 4],
) -> Checked {
    if let Some(axis) = (0..4).find(|&axis| view.shape[axis] != expected[axis]) {
        return Err(AttentionError::Shape {
            tensor: name,
            axis,
            expected: expected[axis],
            actual: view.shape[axis],
        });
    }
    let spec = TensorSpec {
        name,
        shape: &view.shape,
        strides: &view.strides,
    };
    reach(&spec, view.data.len())
}

/// Checks that a tensor's last element lies in its buffer of `actual` elements.
fn reach(spec: &TensorSpec<'_>, actual: usize) -> Checked {
    let needed = spec.required_len().unwrap_or(usize::MAX);
    if actual < needed {
        return Err(AttentionError::Buffer {
            tensor: spec.name,
            needed,
            actual,
        });
    }
    Ok(())
}

/// Checks that a contiguous buffer holds exactly the elements of `shape`.
pub(crate) fn buffer<T>(name: TensorName, buffer: &[T], shape: &[usize]) -> Checked {
    let needed = (shape.iter()).try_fold(1usize, |size, &n| size.checked_mul(n));
    let needed = needed.unwrap_or(usize::MAX);
    if buffer.len() != needed {
        return Err(AttentionError::Buffer {
            tensor: name,
            needed,
            actual: buffer.len(),
        });
    }
    Ok(())
}

/// [`buffer`] for one that may be missing.
fn optional<T>(name: TensorName, optional: Option<&[T]>, shape: &[usize]) -> Checked {
    optional.map_or(Ok(()), |elements| buffer(name, elements, shape))
}

/// Checks a tensor that is given exactly if the problem has it; otherwise the error is `error`.
pub(crate) fn given<T>(
    tensor: Option<T>,
    has: bool,
    error: AttentionError,
    check: impl FnOnce(T) -> Checked,
) -> Checked {
    match tensor {
        Some(tensor) if has => check(tensor),
        None if !has => Ok(()),
        _ => Err(error),
    }
}

pub(crate) fn select(scores: &View<'_, f32, 3>, kept: KeptKeys, intervals: &[Interval]) -> Checked {
    kept.check()?;
    view(TensorName::Scores, scores, &scores.shape)?;
    buffer(TensorName::Intervals, intervals, &scores.shape)?;
    let (size, limit) = (scores.shape[2], i32::MAX as usize);
    if size > limit {
        return Err(AttentionError::TooLarge {
            what: "the number of keys",
            size,
            limit,
        });
    }
    Ok(())
}

pub(crate) fn plan(geometry: &PlanGeometry, bits: &[u32], counts: &[u32]) -> Checked {
    buffer(TensorName::Plan, bits, &geometry.bits_shape())?;
    buffer(TensorName::Plan, counts, &geometry.counts_shape())
}

pub(crate) fn inputs<E: Element>(problem: &Problem, inputs: &Inputs<'_, E>) -> Checked {
    operands(problem, &inputs.q, &inputs.k, &inputs.v)?;
    let error = AttentionError::ScoresWithoutIntervals;
    given(inputs.selection, problem.has_scores, error, |selection| {
        let shape = problem.scores_shape();
        view(TensorName::Scores, &selection.scores, &shape)?;
        buffer(TensorName::Intervals, selection.intervals, &shape)?;
        let learning = selection.learning;
        optional(TensorName::RunnerUpEnds, learning.map(|l| l.ends), &shape)?;
        optional(
            TensorName::KeptFrom,
            learning.and_then(|l| l.kept_from),
            &shape,
        )
    })
}

pub(crate) fn masked_inputs<E: Element>(
    problem: &MaskedProblem,
    inputs: &MaskedInputs<'_, E>,
) -> Checked {
    operands(&problem.attention, &inputs.q, &inputs.k, &inputs.v)?;
    let shape = problem.plan.as_ref().map(|plan| plan.bits_shape());
    let shape: &[usize] = shape.as_ref().map_or(&[0], |shape| shape);
    buffer(TensorName::Plan, inputs.bits.unwrap_or_default(), shape)?;
    match (&inputs.bias, &problem.bias) {
        (Some(bias), Some(shape)) => broadcast_view(TensorName::Bias, bias, shape),
        (None, None) => Ok(()),
        (bias, shape) => Err(AttentionError::Buffer {
            tensor: TensorName::Bias,
            needed: shape.map_or(0, |shape| shape.iter().product()),
            actual: bias.map_or(0, |bias| bias.data.len()),
        }),
    }
}

fn operands<E: Element>(
    problem: &Problem,
    q: &View<'_, E, 4>,
    k: &View<'_, E, 4>,
    v: &View<'_, E, 4>,
) -> Checked {
    if problem.element != E::TYPE {
        let (q, expected) = (TensorName::Query, problem.element);
        return Err(AttentionError::element_type(q, expected, E::TYPE));
    }
    if let EngineChoice::Only(engine) = problem.engine
        && engine != Engine::Cpu
    {
        return Err(AttentionError::Engine {
            engine,
            pass: PassKind::Forward,
            obstacle: Obstacle::OtherBackend,
        });
    }
    view(TensorName::Query, q, &problem.q_shape())?;
    view(TensorName::Key, k, &problem.kv_shape())?;
    view(TensorName::Value, v, &problem.kv_shape())
}

pub(crate) fn outputs<E>(problem: &Problem, outputs: &Outputs<'_, E>) -> Checked {
    buffer(TensorName::Out, outputs.out, &problem.q_shape())?;
    if let Some(residual) = &outputs.residual {
        let shape = problem.residual_shape().ok_or(AttentionError::Residual)?;
        buffer(TensorName::Residual, residual, &shape)?;
    }
    let (rest, shape) = (outputs.lse_rest.as_deref(), problem.lse_shape());
    buffer(TensorName::Lse, outputs.lse, &shape)?;
    optional(TensorName::LseRest, rest, &shape)
}

/// Checks the saved results of the forward pass and the incoming gradients.
pub(crate) fn saved<E: Element>(problem: &Problem, saved: &Saved<'_, E>) -> Checked {
    view(TensorName::Out, &saved.out, &problem.q_shape())?;
    if let Some(residual) = &saved.residual {
        let shape = problem.residual_shape().ok_or(AttentionError::Residual)?;
        view(TensorName::Residual, residual, &shape)?;
    }
    let shape = problem.lse_shape();
    buffer(TensorName::Lse, saved.lse, &shape)?;
    optional(TensorName::LseRest, saved.lse_rest, &shape)?;
    view(TensorName::GradOut, &saved.grad_out, &problem.q_shape())?;
    optional(TensorName::GradLse, saved.grad_lse, &shape)
}

pub(crate) fn gradients<E: Element>(
    problem: &Problem,
    inputs: &Inputs<'_, E>,
    grads: &Gradients<'_, E>,
) -> Checked {
    operand_gradients(problem, grads.q, grads.k, grads.v)?;
    let (shape, error) = (problem.scores_shape(), AttentionError::ScoresGradient);
    given(
        grads.scores.as_deref(),
        problem.scores_learn,
        error,
        |grad| buffer(TensorName::GradScores, grad, &shape),
    )?;
    let learning = inputs.selection.and_then(|selection| selection.learning);
    let error = AttentionError::RankGradient;
    given(grads.rank.as_deref(), learning.is_some(), error, |grad| {
        buffer(TensorName::GradRank, grad, &shape)
    })
}

/// Checks the outputs of the backward pass under a mask.
pub(crate) fn masked_gradients<E: Element>(
    problem: &MaskedProblem,
    grads: &MaskedGradients<'_, E>,
) -> Checked {
    operand_gradients(&problem.attention, grads.q, grads.k, grads.v)?;
    match (&grads.bias, &problem.bias) {
        (Some(bias), Some(shape)) => buffer(TensorName::GradBias, bias, shape),
        (Some(_), None) => Err(AttentionError::BiasGradient),
        (None, _) => Ok(()),
    }
}

fn operand_gradients<E>(problem: &Problem, q: &[E], k: &[E], v: &[E]) -> Checked {
    buffer(TensorName::GradQuery, q, &problem.q_shape())?;
    buffer(TensorName::GradKey, k, &problem.kv_shape())?;
    buffer(TensorName::GradValue, v, &problem.kv_shape())
}
