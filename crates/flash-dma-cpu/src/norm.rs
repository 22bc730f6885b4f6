//! RMS norm of rows and rotary encoding of heads: [`norm_forward`], [`norm_backward`].

use crate::check::{self, given};
use crate::element::Element;
use crate::scratch::Buffer;
use crate::simd::{LANES, Loop, mul_add, run};
use crate::view::View;
use flash_dma_problem::{AttentionError, NormProblem, TensorName};
use rayon::prelude::*;

/// The most parts into which the rows are cut; each has its own sum for the gradient of gamma.
const PARTS: usize = 256;
const PART_ROWS: usize = 8;

/// The weights and the rotary table of rows.
#[derive(Clone, Copy, Debug)]
pub struct NormParameters<'a> {
    /// `[width]`; given exactly if the problem has a norm. Whatever the problem says of its type, this is f32.
    pub gamma: Option<&'a [f32]>,
    /// `[positions, width / 2, 2]`, any strides: cosine and sine of each pair of features; given exactly if the problem
    /// has rotary encoding.
    pub table: Option<View<'a, f32, 3>>,
}

/// The outputs of [`norm_backward`]; every slice is contiguous and overwritten.
#[derive(Debug)]
pub struct NormGradients<'a, E> {
    /// `[batch, len, heads, width]`.
    pub x: &'a mut [E],
    /// `[width]`; given exactly if the problem has a norm. Like gamma, f32.
    pub gamma: Option<&'a mut [f32]>,
}

/// Normalises and rotates `x`, `[batch, len, heads, width]`, into `out`: `[batch, heads, len, width]` stored in the
/// order of `x`, that is as contiguous `[batch, len, heads, width]`. Arithmetic is f32, rounded once.
///
/// # Errors
///
/// [`AttentionError`] if an argument does not fit the problem. Nothing is written then.
pub fn norm_forward<E: Element>(
    problem: &NormProblem,
    x: View<'_, E, 4>,
    parameters: NormParameters<'_>,
    out: &mut [E],
) -> Result<(), AttentionError> {
    let shape = problem.x_shape();
    check_parameters::<E>(problem, &parameters)?;
    check::view(TensorName::Tokens, &x, &shape)?;
    check::buffer(TensorName::Out, out, &shape)?;
    if problem.is_empty() {
        return Ok(());
    }
    let rows = Rows::new(problem, parameters);
    out.par_chunks_mut(rows.part * problem.width)
        .enumerate()
        .for_each(|(part, out)| {
            run(Forward {
                rows: &rows,
                x: &x,
                first: part * rows.part,
                out,
            });
        });
    Ok(())
}

/// The gradients of [`norm_forward`], from the gradient of the output, `[batch, heads, len, width]` of any strides. `x`
/// is given exactly if there is a norm: the rotation alone does not need it. The gradient of gamma adds up the rows of
/// each part in f32 and the parts in f64, both in order.
///
/// # Errors
///
/// [`AttentionError`] if an argument does not fit the problem. Nothing is written then.
pub fn norm_backward<E: Element>(
    problem: &NormProblem,
    x: Option<View<'_, E, 4>>,
    parameters: NormParameters<'_>,
    grad_out: View<'_, E, 4>,
    grads: NormGradients<'_, E>,
) -> Result<(), AttentionError> {
    let (shape, width) = (problem.x_shape(), problem.width);
    check_parameters::<E>(problem, &parameters)?;
    let (tensor, norm) = (TensorName::Tokens, problem.epsilon.is_some());
    let error = AttentionError::NormOperand { tensor };
    given(x, norm, error, |x| check::view(tensor, &x, &shape))?;
    check::view(TensorName::GradOut, &grad_out, &problem.out_shape())?;
    check::buffer(TensorName::GradTokens, grads.x, &shape)?;
    let (tensor, gamma) = (TensorName::GradNormWeight, grads.gamma.as_deref());
    let error = AttentionError::NormOperand { tensor };
    given(gamma, norm, error, |gamma| {
        check::buffer(tensor, gamma, &[width])
    })?;
    let mut parts = Vec::new();
    if !problem.is_empty() {
        let rows = Rows::new(problem, parameters);
        let part = |(part, grad): (usize, &mut [E])| {
            run(Backward {
                rows: &rows,
                x: x.as_ref(),
                grad_out: &grad_out,
                first: part * rows.part,
                grad,
            })
        };
        let chunks = grads.x.par_chunks_mut(rows.part * width);
        parts = chunks.enumerate().map(part).collect();
    }
    if let Some(gamma) = grads.gamma {
        for (j, gamma) in gamma.iter_mut().enumerate() {
            *gamma = parts.iter().map(|part| f64::from(part[j])).sum::<f64>() as f32;
        }
    }
    Ok(())
}

fn check_parameters<E: Element>(
    problem: &NormProblem,
    parameters: &NormParameters<'_>,
) -> Result<(), AttentionError> {
    if problem.element != E::TYPE {
        let (tensor, expected) = (TensorName::Tokens, problem.element);
        return Err(AttentionError::element_type(tensor, expected, E::TYPE));
    }
    let (tensor, norm) = (TensorName::NormWeight, problem.epsilon.is_some());
    let (error, shape) = (AttentionError::NormOperand { tensor }, [problem.width]);
    given(parameters.gamma, norm, error, |gamma| {
        check::buffer(tensor, gamma, &shape)
    })?;
    let tensor = TensorName::RotaryTable;
    match (&parameters.table, problem.table_shape()) {
        (Some(table), Some(shape)) => check::view(tensor, table, &shape),
        (None, None) => Ok(()),
        _ => Err(AttentionError::NormOperand { tensor }),
    }
}

/// The data shared by all parts. The cut of the rows depends on their number alone.
struct Rows<'a> {
    problem: &'a NormProblem,
    parameters: NormParameters<'a>,
    part: usize,
}

impl<'a> Rows<'a> {
    fn new(problem: &'a NormProblem, parameters: NormParameters<'a>) -> Self {
        Self {
            problem,
            parameters,
            part: problem.row_count().div_ceil(PARTS).max(PART_ROWS),
        }
    }

    /// Sequence, token and head of a row.
    fn place(&self, row: usize) -> [usize; 3] {
        let p = self.problem;
        [row / p.heads / p.len, row / p.heads % p.len, row % p.heads]
    }

    /// `1 / sqrt(mean of x² + epsilon)`.
    #[inline(always)]
    fn reciprocal<const FUSED: bool>(&self, x: &[f32], epsilon: f32) -> f32 {
        1.0 / (dot::<FUSED>(x, x) / x.len() as f32 + epsilon).sqrt()
    }

    /// Turns each pair of features by the angle of a token's position, or back.
    #[inline(always)]
    fn rotate(&self, token: usize, back: bool, row: &mut [f32]) {
        let (Some(table), Some(rotary)) = (&self.parameters.table, self.problem.rotary) else {
            return;
        };
        let first = (rotary.start + token) * table.strides[0];
        for (i, pair) in row.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let at = first + i * table.strides[1];
            let (cos, sin) = (table.data[at], table.data[at + 1]);
            let sin = if back { -sin } else { sin };
            *pair = [pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin];
        }
    }
}

/// The sum of products, in the order of lanes.
#[inline(always)]
fn dot<const FUSED: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] = mul_add::<FUSED>(a[lane], b[lane], sums[lane]);
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

struct Forward<'a, E> {
    rows: &'a Rows<'a>,
    x: &'a View<'a, E, 4>,
    first: usize,
    out: &'a mut [E],
}

impl<E: Element> Loop for Forward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let (rows, p) = (self.rows, self.rows.problem);
        let mut buffer = Buffer::default();
        let wide = buffer.get(p.width);
        for (row, out) in self.out.chunks_exact_mut(p.width).enumerate() {
            let [batch, token, head] = rows.place(self.first + row);
            E::widen(self.x.row(batch, token, head), wide);
            if let (Some(gamma), Some(epsilon)) = (rows.parameters.gamma, p.epsilon) {
                let r = rows.reciprocal::<FUSED>(wide, epsilon);
                for (x, gamma) in wide.iter_mut().zip(gamma) {
                    *x = *x * r * gamma;
                }
            }
            rows.rotate(token, false, wide);
            E::round(wide, out);
        }
    }
}

/// The rows of one part, backward: the sum of their gradients of gamma, if there is a norm.
struct Backward<'a, E> {
    rows: &'a Rows<'a>,
    x: Option<&'a View<'a, E, 4>>,
    grad_out: &'a View<'a, E, 4>,
    first: usize,
    grad: &'a mut [E],
}

impl<E: Element> Loop for Backward<'_, E> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<const FUSED: bool>(self) -> Vec<f32> {
        let (rows, p) = (self.rows, self.rows.problem);
        let mut sums = vec![0.0; rows.parameters.gamma.map_or(0, <[f32]>::len)];
        let mut buffer = Buffer::default();
        let (wide, grads) = buffer.get(2 * p.width).split_at_mut(p.width);
        for (row, target) in self.grad.chunks_exact_mut(p.width).enumerate() {
            let [batch, token, head] = rows.place(self.first + row);
            E::widen(self.grad_out.row(batch, head, token), grads);
            rows.rotate(token, true, grads);
            if let (Some(x), Some(gamma), Some(epsilon)) =
                (self.x, rows.parameters.gamma, p.epsilon)
            {
                E::widen(x.row(batch, token, head), wide);
                let r = rows.reciprocal::<FUSED>(wide, epsilon);
                for (((sum, x), g), gamma) in
                    sums.iter_mut().zip(&*wide).zip(&mut *grads).zip(gamma)
                {
                    *sum += *g * (x * r);
                    *g *= gamma;
                }
                let mean = dot::<FUSED>(grads, wide) * r * r / p.width as f32;
                for (g, x) in grads.iter_mut().zip(&*wide) {
                    *g = r * (*g - x * mean);
                }
            }
            E::round(grads, target);
        }
        sums
    }
}
