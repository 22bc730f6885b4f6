//! The conditions that a call must satisfy before anything is launched.

use crate::args::{Gradients, Inputs, Outputs, Saved, Selection};
use crate::host::cpu;
use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{AddressType, ElemType, FloatKind};
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AttentionError, ElementType, Obstacle, Problem, TensorName, TensorSpec};

/// The CubeCL type of an element type.
pub fn elem_type(element: ElementType) -> ElemType {
    ElemType::Float(match element {
        ElementType::F32 => FloatKind::F32,
        ElementType::F16 => FloatKind::F16,
        ElementType::Bf16 => FloatKind::BF16,
    })
}

/// The layout of a tensor in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Any strides with a contiguous last axis.
    Strided,
    /// Row-major without gaps.
    Contiguous,
    /// For `[batch, heads, len, features]`: like [`Contiguous`](Self::Contiguous), or with each token's heads together.
    Rows,
    /// Any strides on any axis, such as 0 where it broadcasts.
    Broadcast,
}

/// True if the rows of `[.., heads, len, features]` lie token by token, not head by head.
pub(crate) fn queries_before_heads(rows: &TensorBinding) -> bool {
    let axes = rows.shape.len();
    let (heads, len) = (axes - 3, axes - 2);
    rows.shape[heads] > 1 && rows.shape[len] > 1 && rows.strides[heads] < rows.strides[len]
}

/// Checks shape, strides and buffer of a tensor whose elements have `size` bytes.
///
/// # Errors
///
/// An [`AttentionError`] that names the tensor.
pub fn check_tensor(
    name: TensorName,
    tensor: &TensorBinding,
    shape: &[usize],
    size: usize,
    layout: Layout,
) -> Result<(), AttentionError> {
    let spec = TensorSpec {
        name,
        shape: &tensor.shape[..],
        strides: &tensor.strides[..],
    };
    let ones = vec![1; shape.len()];
    let strides = match layout {
        Layout::Broadcast => &ones[..],
        _ => spec.strides,
    };
    TensorSpec { strides, ..spec }.check(shape)?;
    let without_gaps = |mut axes: Vec<usize>| {
        let mut dense = 1;
        // The strides of an empty tensor are never used, and allocators choose them differently.
        shape.contains(&0)
            || std::iter::from_fn(|| axes.pop()).all(|axis| {
                let fits = shape[axis] == 1 || spec.strides[axis] == dense;
                dense *= shape[axis];
                fits
            })
    };
    let fits = match layout {
        Layout::Strided | Layout::Broadcast => true,
        Layout::Contiguous => without_gaps((0..shape.len()).collect()),
        Layout::Rows => without_gaps(vec![0, 1, 2, 3]) || without_gaps(vec![0, 2, 1, 3]),
    };
    if !fits {
        return Err(AttentionError::Strides {
            tensor: name,
            strides: spec.strides.to_vec(),
        });
    }
    let needed = spec.required_len().unwrap_or(usize::MAX);
    let actual = tensor.handle.size_in_used() as usize / size;
    if needed > actual {
        return Err(AttentionError::Buffer {
            tensor: name,
            needed,
            actual,
        });
    }
    Ok(())
}

pub(crate) fn check_inputs(problem: &Problem, inputs: &Inputs) -> Result<(), AttentionError> {
    let (q, kv) = (problem.q_shape(), problem.kv_shape());
    let (size, strided) = (problem.element.size(), Layout::Strided);
    check_tensor(TensorName::Query, &inputs.q, &q, size, strided)?;
    check_tensor(TensorName::Key, &inputs.k, &kv, size, strided)?;
    check_tensor(TensorName::Value, &inputs.v, &kv, size, strided)?;
    match &inputs.selection {
        Some(selection) if problem.has_scores => check_selection(problem, selection),
        None if !problem.has_scores => Ok(()),
        _ => Err(AttentionError::ScoresWithoutIntervals),
    }
}

fn check_selection(problem: &Problem, selection: &Selection) -> Result<(), AttentionError> {
    let (shape, pairs) = (problem.scores_shape(), problem.intervals_shape());
    let (name, scores) = (TensorName::Scores, &selection.scores);
    check_tensor(name, scores, &shape, 4, Layout::Strided)?;
    check_words(TensorName::Intervals, Some(&selection.intervals), &pairs)?;
    let learning = selection.learning.as_ref();
    check_words(TensorName::RunnerUpEnds, learning.map(|l| &l.ends), &shape)?;
    let kept_from = learning.and_then(|l| l.kept_from.as_ref());
    check_words(TensorName::KeptFrom, kept_from, &shape)
}

/// [`check_tensor`] for a contiguous tensor of words that may be missing.
fn check_words(
    name: TensorName,
    tensor: Option<&TensorBinding>,
    shape: &[usize],
) -> Result<(), AttentionError> {
    tensor.map_or(Ok(()), |tensor| {
        check_tensor(name, tensor, shape, 4, Layout::Contiguous)
    })
}

fn check_residual(
    problem: &Problem,
    residual: Option<&TensorBinding>,
    layout: Layout,
) -> Result<(), AttentionError> {
    let Some(residual) = residual else {
        return Ok(());
    };
    let shape = problem.residual_shape().ok_or(AttentionError::Residual)?;
    let size = problem.element.size();
    check_tensor(TensorName::Residual, residual, &shape, size, layout)
}

/// Checks every output against the problem.
pub(crate) fn check_outputs(problem: &Problem, outputs: &Outputs) -> Result<(), AttentionError> {
    let (rows, lse) = (problem.q_shape(), problem.lse_shape());
    let size = problem.element.size();
    check_tensor(TensorName::Out, &outputs.out, &rows, size, Layout::Rows)?;
    check_residual(problem, outputs.residual.as_ref(), Layout::Rows)?;
    let order = queries_before_heads(&outputs.out);
    if let Some(residual) = &outputs.residual
        && queries_before_heads(residual) != order
    {
        return Err(AttentionError::Strides {
            tensor: TensorName::Residual,
            strides: residual.strides.to_vec(),
        });
    }
    check_words(TensorName::Lse, Some(&outputs.lse), &lse)?;
    check_words(TensorName::LseRest, outputs.lse_rest.as_ref(), &lse)
}

pub(crate) fn check_saved(problem: &Problem, saved: &Saved) -> Result<(), AttentionError> {
    let (rows, lse) = (problem.q_shape(), problem.lse_shape());
    let (size, strided) = (problem.element.size(), Layout::Strided);
    check_tensor(TensorName::Out, &saved.out, &rows, size, strided)?;
    check_residual(problem, saved.residual.as_ref(), strided)?;
    check_words(TensorName::Lse, Some(&saved.lse), &lse)?;
    check_words(TensorName::LseRest, saved.lse_rest.as_ref(), &lse)?;
    check_tensor(TensorName::GradOut, &saved.grad_out, &rows, size, strided)?;
    check_words(TensorName::GradLse, saved.grad_lse.as_ref(), &lse)
}

/// Checks every output against the problem.
pub(crate) fn check_gradients(
    problem: &Problem,
    inputs: &Inputs,
    grads: &Gradients,
) -> Result<(), AttentionError> {
    let (q, kv) = (problem.q_shape(), problem.kv_shape());
    let scores = problem.scores_shape();
    let (size, contiguous) = (problem.element.size(), Layout::Contiguous);
    check_tensor(TensorName::GradQuery, &grads.q, &q, size, contiguous)?;
    check_tensor(TensorName::GradKey, &grads.k, &kv, size, contiguous)?;
    check_tensor(TensorName::GradValue, &grads.v, &kv, size, contiguous)?;
    if grads.scores.is_some() != problem.scores_learn {
        return Err(AttentionError::ScoresGradient);
    }
    check_words(TensorName::GradScores, grads.scores.as_ref(), &scores)?;
    let learning = inputs.selection.as_ref().and_then(|s| s.learning.as_ref());
    if grads.rank.is_some() != learning.is_some() {
        return Err(AttentionError::RankGradient);
    }
    check_words(TensorName::GradRank, grads.rank.as_ref(), &scores)
}

/// Checks that the device stores and converts the element type.
pub(crate) fn check_type(client: &Client, element: ElementType) -> Result<(), AttentionError> {
    let unsupported = |what| Err(AttentionError::Unsupported { what });
    // Some devices convert a type that their buffers cannot hold.
    let used = TypeUsage::Buffer | TypeUsage::Conversion;
    let usage = client.properties().type_usage(elem_type(element));
    if !usage.is_superset(used) {
        return unsupported(format!("tensors of {element}"));
    }
    if element == ElementType::Bf16 && !cpu::rounds_to_bf16(client) {
        return unsupported(cpu::NO_ROUNDING.into());
    }
    Ok(())
}

/// Checks the number of buffers of a kernel and of its cubes: tiles, heads, sequences.
pub(crate) fn check_grid(
    client: &Client,
    bindings: u32,
    cubes: [usize; 3],
) -> Result<(), AttentionError> {
    let most = most_buffers(client);
    if bindings as usize > most {
        let (needed, limit) = (bindings + 1, most + 1);
        return Err(AttentionError::Unsupported {
            what: format!("{needed} buffers a kernel: its limit is {limit}"),
        });
    }
    flash_dma_problem::check_grid(cubes, limits(client))
}

/// The most buffers of a kernel's own: shapes and strides take one more on some runtimes.
pub(crate) fn most_buffers(client: &Client) -> usize {
    client.properties().hardware.max_bindings.saturating_sub(1) as usize
}

/// The most cubes of a launch along each axis.
pub(crate) fn limits(client: &Client) -> [usize; 3] {
    let (x, y, z) = client.properties().hardware.max_cube_count;
    [x, y, z].map(|limit| limit as usize)
}

/// The widest vector that reads all `tensors` (elements of `size` bytes): rows must start at multiples of its size.
pub fn vector_size(tensors: &[&TensorBinding], size: usize) -> usize {
    let aligned = tensors.iter().all(|tensor| {
        let outer = tensor.strides.len() - 1;
        tensor.strides[..outer].iter().all(|s| s.is_multiple_of(4)) && begins_at(tensor, 4 * size)
    });
    if aligned { 4 } else { 1 }
}

pub(crate) fn begins_at(tensor: &TensorBinding, bytes: usize) -> bool {
    let begin = tensor.handle.offset_start.unwrap_or(0) as usize;
    begin.is_multiple_of(bytes)
}

/// True if the rows of a tensor, of elements of `size` bytes, can be read in vectors of `n` elements. Unlike in
/// [`vector_size`], strides of axes of one element do not count.
pub(crate) fn reads_in(tensor: &TensorBinding, n: usize, size: usize) -> bool {
    let axes = tensor.shape.len();
    let outer = |axis: usize| tensor.shape[axis] <= 1 || tensor.strides[axis].is_multiple_of(n);
    tensor.shape[axes - 1].is_multiple_of(n)
        && (0..axes - 1).all(outer)
        && begins_at(tensor, n * size)
}

/// The address type that reaches every element (of `size` bytes) of `tensors`.
pub(crate) fn address_type(tensors: &[&TensorBinding], size: usize) -> AddressType {
    let each = tensors.iter().map(|t| t.required_address_type(size));
    each.max().unwrap_or(AddressType::U32)
}

/// Bytes that copies and `ldmatrix` move at once: rows must start at a multiple of this.
pub(crate) const SEGMENT_BYTES: usize = 16;

/// The most elements of `size` bytes each, at most a segment of them, that a kernel reads at once if `fits` allows their number;
/// 1 if it allows none.
pub(crate) fn widest_vector(client: &Client, size: usize, fits: impl Fn(usize) -> bool) -> usize {
    let mut sizes = client.io_optimized_vector_sizes(size);
    sizes
        .find(|&n| n * size <= SEGMENT_BYTES && fits(n))
        .unwrap_or(1)
}

/// Refuses tensors of four axes whose rows are not those of [`rows_are_segments`].
pub(crate) fn check_segments<'a>(
    tensors: impl IntoIterator<Item = &'a TensorBinding>,
    element_size: usize,
) -> Result<(), Obstacle> {
    let mut tensors = tensors.into_iter();
    let aligned = tensors.all(|tensor| rows_are_segments(tensor, element_size));
    aligned.then_some(()).ok_or(Obstacle::UnalignedRows)
}

/// True if every row of a tensor of four axes begins at a multiple of 16 bytes, and their distance fits 32 bits.
pub(crate) fn rows_are_segments(tensor: &TensorBinding, element_size: usize) -> bool {
    let pitch = |axis: usize| tensor.strides[axis] * element_size;
    let aligned = |axis| tensor.shape[axis] <= 1 || pitch(axis).is_multiple_of(SEGMENT_BYTES);
    tensor.strides.len() == 4
        && begins_at(tensor, SEGMENT_BYTES)
        && (0..3).all(aligned)
        && (tensor.shape[2] <= 1 || u32::try_from(pitch(2)).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{client, strided};

    #[test]
    fn the_stride_of_an_axis_of_one_element_does_not_matter() {
        let client = client();
        let check = |strides: [usize; 4], layout| {
            let shape = [2, 1, 3, 4];
            let tensor = strided(&client, &[0.5f32; 24], &shape, &strides);
            check_tensor(TensorName::Out, &tensor, &shape, 4, layout)
        };
        for layout in [Layout::Contiguous, Layout::Strided] {
            assert_eq!(check([12, 12, 4, 1], layout), Ok(()));
            assert_eq!(check([12, 7, 4, 1], layout), Ok(()));
        }
        assert_eq!(check([16, 16, 5, 1], Layout::Strided), Ok(()));
        let (tensor, strides) = (TensorName::Out, vec![16, 16, 5, 1]);
        let refused = AttentionError::Strides { tensor, strides };
        assert_eq!(check([16, 16, 5, 1], Layout::Contiguous), Err(refused));
    }
}
