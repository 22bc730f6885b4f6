//! One call of an engine, as plain data that a test may modify.

use flash_dma_problem::{ElementType, Interval, Problem};
use flash_dma_reference::Inputs;
use flash_dma_reference::compose::max_live;
use flash_dma_reference::generate::gradients;

/// The layout of a tensor in its buffer. Elements that the shape does not reach are NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row after row.
    Contiguous,
    /// `[batch, len, heads, dim]` data (`[heads, batch, len]` for scores), seen through a transpose.
    Transposed,
    /// One element between two rows, so only the first row is aligned.
    Padded,
    /// Token by token, each in a row with as many other heads, and as many again: a part of packed q, k and v.
    Packed,
    /// Contiguous, with the results after two other elements, off the 16 bytes at which buffers begin.
    Behind,
    /// Contiguous, but an axis along which the values repeat has a stride of 0.
    Broadcast,
}

/// The tokens `picks` of contiguous `[rows, len, width]`.
pub fn picked(
    values: &[f64],
    len: usize,
    width: usize,
    picks: impl Iterator<Item = usize> + Clone,
) -> Vec<f64> {
    let mut all = Vec::new();
    for row in values.chunks_exact(len * width) {
        for pick in picks.clone() {
            all.extend_from_slice(&row[pick * width..(pick + 1) * width]);
        }
    }
    all
}

/// A tensor: `values[sum(index * strides)]`.
#[derive(Clone, Debug)]
pub struct Raw {
    /// Size of each axis.
    pub shape: Vec<usize>,
    /// Elements from one index to the next.
    pub strides: Vec<usize>,
    /// The buffer.
    pub values: Vec<f64>,
    /// The element type in which an engine gets the values.
    pub element: ElementType,
}

impl Raw {
    /// Lays contiguous values out.
    pub fn new(values: &[f64], shape: &[usize], element: ElementType, layout: Layout) -> Self {
        let rank = shape.len();
        // The axes from the outermost in memory to the innermost.
        let axes: Vec<usize> = match (layout, rank) {
            (Layout::Transposed | Layout::Packed, 4) => vec![0, 2, 1, 3],
            (Layout::Transposed | Layout::Packed, 3) => vec![1, 0, 2],
            _ => (0..rank).collect(),
        };
        let repeats = match layout {
            Layout::Broadcast => repetitions(values, shape),
            _ => vec![false; rank],
        };
        let mut strides = vec![1; rank];
        let mut size = 1;
        for (depth, &axis) in axes.iter().enumerate().rev() {
            if repeats[axis] {
                strides[axis] = 0;
                continue;
            }
            if layout == Layout::Packed && rank == 4 && depth == 1 {
                size *= 3;
            }
            strides[axis] = size;
            let gap = usize::from(layout == Layout::Padded && depth == rank - 1);
            // An empty axis leaves the strides of the others as they would be, so views stay views.
            size *= (shape[axis] + gap).max(1);
        }
        let mut placed = vec![f64::NAN; size];
        // Row by row; rows of one element if all elements of a row are equal.
        let width = match strides.last() {
            Some(1) => shape[rank - 1],
            _ => 1,
        };
        let outer = if width > 1 { rank - 1 } else { rank };
        let mut index = vec![0; outer];
        for row in values.chunks_exact(width.max(1)) {
            let at: usize = index.iter().zip(&strides).map(|(i, s)| i * s).sum();
            placed[at..at + row.len()].copy_from_slice(row);
            for axis in (0..outer).rev() {
                index[axis] += 1;
                if index[axis] < shape[axis] {
                    break;
                }
                index[axis] = 0;
            }
        }
        if let Some(end) = shape
            .iter()
            .zip(&strides)
            .try_fold(1, |end, (&n, s)| Some(end + n.checked_sub(1)? * s))
        {
            placed.truncate(end);
        }
        Self {
            shape: shape.into(),
            strides,
            values: placed,
            element,
        }
    }
}

/// For each of several axes, true if contiguous values are the same along it.
fn repetitions(values: &[f64], shape: &[usize]) -> Vec<bool> {
    let mut inner = values.len();
    let along = |&size: &usize| {
        inner /= size.max(1);
        // An element, and the one at index 0 of the axis.
        let same =
            |at: usize| values[at].to_bits() == values[at - at / inner % size * inner].to_bits();
        size > 1 && (0..values.len()).all(same)
    };
    shape.iter().map(along).collect()
}

/// The gradients of the results of a forward pass: of `out`, and of the LSE if it has one.
#[derive(Clone, Debug)]
pub struct Grads {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub out: Vec<f64>,
    /// `[batch, q_heads, q_len]`.
    pub lse: Option<Vec<f64>>,
}

impl Grads {
    /// Random gradients of both.
    pub fn random(problem: &Problem, seed: u64) -> Self {
        let (out, lse) = gradients(problem, seed);
        let lse = Some(lse);
        Self { out, lse }
    }

    /// Gradients of `out` alone.
    pub fn of_out(out: Vec<f64>) -> Self {
        Self { out, lse: None }
    }

    /// The gradients of `out`, and none of the LSE.
    pub fn without_lse(self) -> Self {
        Self::of_out(self.out)
    }

    /// The gradients in the form that the oracle takes.
    pub fn parts(&self) -> (&[f64], Option<&[f64]>) {
        (&self.out, self.lse.as_deref())
    }
}

/// A call of the forward or the backward pass.
#[derive(Clone, Debug)]
pub struct Call {
    /// Sizes and options.
    pub problem: Problem,
    /// `q` of the problem.
    pub q: Raw,
    /// `k` of the problem.
    pub k: Raw,
    /// `v` of the problem.
    pub v: Raw,
    /// The scores of the problem.
    pub scores: Option<Raw>,
    /// The intervals by the engine's selection on the scores.
    pub intervals: Option<Vec<Interval>>,
    /// One past the last position at which each key is a runner-up; `None` without runners-up.
    pub runner_up_ends: Option<Vec<u32>>,
    /// The first position at which each key is kept for its rank, if kept keys learn.
    pub kept_from: Option<Vec<u32>>,
    /// True if the intervals are not the engine's own: an engine that selects by itself must take them then.
    pub given: bool,
    /// The gradient of `out`.
    pub grad_out: Raw,
    /// The gradient of the LSE, contiguous.
    pub grad_lse: Option<Vec<f64>>,
    /// A sink logit of each query head, without a key, if the engine [has them](crate::Engine::SINKS).
    pub sink: Option<Vec<f64>>,
    /// Number of elements that the buffers of the results lack at their end.
    pub missing: usize,
    /// The layout of the tensors passed from the forward to the backward pass.
    pub layout: Layout,
}

impl Call {
    /// The call of the oracle's inputs, without the intervals.
    pub fn new(inputs: &Inputs, layout: Layout, grads: &Grads) -> Self {
        let p = &inputs.problem;
        let place = |values: &[f64], shape: [usize; 4]| Raw::new(values, &shape, p.element, layout);
        Self {
            problem: *p,
            q: place(&inputs.q, p.q_shape()),
            k: place(&inputs.k, p.kv_shape()),
            v: place(&inputs.v, p.kv_shape()),
            scores: inputs
                .scores
                .as_ref()
                .map(|z| Raw::new(z, &p.scores_shape(), ElementType::F32, layout)),
            intervals: None,
            runner_up_ends: None,
            kept_from: None,
            given: false,
            grad_out: place(&grads.out, p.q_shape()),
            grad_lse: grads.lse.clone(),
            sink: None,
            missing: 0,
            layout,
        }
    }

    /// The most keys of a head that one position would attend to if every interval ended where its key ceases to be a
    /// runner-up.
    ///
    /// # Panics
    ///
    /// Without intervals and runners-up.
    pub fn most_until_far(&self) -> usize {
        let ends = self.runner_up_ends.as_ref().expect("runners-up");
        let intervals = self.intervals.as_ref().expect("intervals");
        let all: Vec<Interval> = (intervals.iter().zip(ends))
            .map(|(&interval, &end)| Interval { end, ..interval })
            .collect();
        let heads = all.chunks_exact(self.problem.k_len.max(1)).map(max_live);
        heads.max().unwrap_or(0).max(1)
    }
}
