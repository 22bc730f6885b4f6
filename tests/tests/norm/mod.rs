//! RMS norm of rows, and norm and rotary encoding of heads, against the oracle on every engine.

use flash_dma_problem::{NormProblem, Rotary};
use flash_dma_reference::norm::Norm;
use flash_dma_tests::norm::{NormCall, NormEngine, Operation, check, grad_out};
use flash_dma_tests::prelude::*;

every_runtime!(
    rows,
    wide_rows,
    many_rows,
    heads,
    parts,
    gammas_of_another_type,
    layouts,
    epsilons,
    not_a_number,
    nothing,
    repeats_are_bit_equal,
);
on_burn_cpu!(a_few_heads);

const EPSILON: f32 = 1e-5;

fn row_problem(rows: usize, width: usize, element: ElementType) -> NormProblem {
    NormProblem::rows(&[rows, width], &[width], element, EPSILON).expect("a good case")
}

/// `[batch, len, heads, head_dim]`, with a norm, with rotary encoding from a position on.
fn head_problem(
    shape: [usize; 4],
    norm: bool,
    start: Option<usize>,
    element: ElementType,
) -> NormProblem {
    let gamma = [shape[3]];
    let norm = norm.then_some((&gamma[..], EPSILON));
    // Some positions are left over.
    let rotary = start.map(|start| Rotary {
        positions: start + shape[1] + 3,
        start,
    });
    NormProblem::heads(&shape, norm, rotary, element).expect("a good case")
}

fn check_rows<E: NormEngine>(engine: &E, problem: NormProblem) {
    let inputs = Norm::random(problem, problem.width as u64);
    check(engine, &inputs, Operation::Rows, Layout::Contiguous);
}

fn check_heads<E: NormEngine>(engine: &E, problem: NormProblem, layout: Layout) {
    let inputs = Norm::random(problem, problem.width as u64);
    check(engine, &inputs, Operation::Heads, layout);
}

/// Widths that are read in vectors of every size, in every type; numbers of rows off every block.
fn rows<E: NormEngine>(engine: &E) {
    for (n, width) in E::cases([1, 17, 24], [2, 4, 113, 256, 257], [100, 512, 1000])
        .into_iter()
        .enumerate()
    {
        for (rows, element) in E::cases(
            [(17, F32), (113, Bf16)],
            [(1, F32), (257, F16), (1, Bf16), (113, F16)],
            [(5000, F32), (5000, F16)],
        ) {
            if E::SIZE == Size::Small && n > 0 && element == F32 {
                continue;
            }
            check_rows(engine, row_problem(rows, width, element));
        }
    }
}

/// Rows too wide for one plane.
fn wide_rows<E: NormEngine>(engine: &E) {
    for (rows, width, element) in E::cases(
        [(3, 2050, F32)],
        [(5, 4096, Bf16), (9, 8192, F32), (2, 8191, F16)],
        [
            (333, 1024, F32),
            (333, 2048, Bf16),
            (600, 3000, Bf16),
            (600, 8192, Bf16),
            (64, 8191, F32),
            (600, 5120, F16),
        ],
    ) {
        check_rows(engine, row_problem(rows, width, element));
    }
}

/// More rows than are summed at once, so that both stages of the gradient of gamma have several terms.
fn many_rows<E: NormEngine>(engine: &E) {
    for (rows, width, element) in E::cases(
        [(1100, 8, F32)],
        [(20_000, 16, Bf16), (9_001, 33, F32)],
        [(30_000, 128, Bf16), (5_000, 1024, Bf16), (20_001, 96, F32)],
    ) {
        check_rows(engine, row_problem(rows, width, element));
    }
}

/// Norm and rotary encoding at once: several heads and sequences, every kind of head dimension.
fn heads<E: NormEngine>(engine: &E) {
    for (n, shape) in E::cases(
        [[1, 1, 1, 8], [2, 17, 3, 24]],
        [
            [2, 113, 2, 64],
            [1, 257, 4, 16],
            [1, 33, 2, 128],
            [2, 9, 1, 256],
            [1, 20, 5, 40],
        ],
        [[2, 1000, 8, 128], [1, 3001, 2, 64], [3, 500, 3, 96]],
    )
    .into_iter()
    .enumerate()
    {
        for element in TYPES {
            if E::SIZE == Size::Small && n == 0 && element != F32 {
                continue;
            }
            let start = [0, 5, 70][n % 3];
            let problem = head_problem(shape, true, Some(start), element);
            check_heads(engine, problem, Layout::Contiguous);
        }
    }
}

/// Either alone.
fn parts<E: NormEngine>(engine: &E) {
    for shape in E::cases([[2, 19, 2, 16]], [[1, 113, 3, 64]], [[2, 257, 4, 128]]) {
        for element in E::cases([Bf16], [F32], [F16]) {
            for (norm, start) in [(true, None), (false, Some(4))] {
                let problem = head_problem(shape, norm, start, element);
                check_heads(engine, problem, Layout::Contiguous);
            }
        }
    }
}

/// Layers that compute in 16 bits by weights of f32, and the reverse.
fn gammas_of_another_type<E: NormEngine>(engine: &E) {
    for (element, gamma) in [(Bf16, F32), (F16, F32), (F32, Bf16)] {
        for width in E::cases([17, 24], [256, 257], [1000]) {
            check_rows(engine, row_problem(20, width, element).with_gamma(gamma));
        }
        for shape in E::cases([[2, 7, 3, 8]], [[1, 40, 4, 64]], [[2, 257, 4, 128]]) {
            let problem = head_problem(shape, true, Some(2), element).with_gamma(gamma);
            check_heads(engine, problem, Layout::Contiguous);
        }
    }
}

/// Rows that begin anywhere, and heads that lie before tokens.
fn layouts<E: NormEngine>(engine: &E) {
    for shape in E::cases([[2, 7, 3, 8]], [[2, 40, 4, 64]], [[2, 70, 2, 128]]) {
        for element in E::cases([Bf16], [F32], []) {
            for layout in [Layout::Transposed, Layout::Padded, Layout::Behind] {
                let problem = head_problem(shape, true, Some(3), element);
                check_heads(engine, problem, layout);
            }
            let problem = head_problem(shape, false, Some(3), element);
            check_heads(engine, problem, Layout::Padded);
        }
    }
}

/// An epsilon that dominates, one that vanishes, and rows of zeros.
fn epsilons<E: NormEngine>(engine: &E) {
    for epsilon in [10.0, 1e-30] {
        let shape = [9, 16];
        let problem = NormProblem::rows(&shape, &[16], F32, epsilon).expect("a good case");
        let mut inputs = Norm::random(problem, 3);
        if epsilon > 1.0 {
            inputs.x[32..64].fill(0.0);
        }
        check(engine, &inputs, Operation::Rows, Layout::Contiguous);
    }
}

/// A row that is not a number makes its own outputs and gradients NaN, those of gamma, and nothing else.
fn not_a_number<E: NormEngine>(engine: &E) {
    for element in E::cases([F32], [Bf16], []) {
        for norm in [true, false] {
            let mut inputs = Norm::random(head_problem([2, 9, 2, 16], norm, Some(0), element), 3);
            inputs.x[5 * 16 + 3] = f64::NAN;
            check(engine, &inputs, Operation::Heads, Layout::Contiguous);
        }
    }
}

/// No rows: an empty result, and zeros for gamma.
fn nothing<E: NormEngine>(engine: &E) {
    let none = Norm::random(row_problem(0, 24, F32), 1);
    check(engine, &none, Operation::Rows, Layout::Contiguous);
    for (shape, norm) in [([2, 0, 3, 8], true), ([0, 4, 3, 8], false)] {
        let none = Norm::random(head_problem(shape, norm, Some(0), F32), 1);
        check(engine, &none, Operation::Heads, Layout::Contiguous);
    }
}

/// Two stages in a fixed order.
fn repeats_are_bit_equal<E: NormEngine>(engine: &E) {
    for shape in E::cases([[1, 40, 3, 8]], [[2, 700, 4, 64]], [[2, 2000, 8, 128]]) {
        let inputs = Norm::random(head_problem(shape, true, Some(1), F32), 5);
        let grad_out = grad_out(&inputs.problem, 5);
        let call = NormCall::new(&inputs, Operation::Heads, Layout::Contiguous, &grad_out);
        let first = engine.norm(&call).expect("a good case");
        for _ in 0..if E::SIZE == Size::Large { 20 } else { 2 } {
            assert!(engine.norm(&call).expect("a good case") == first);
        }
    }
}

/// Burn compiles its own operations for minutes there.
#[cfg(feature = "cpu")]
fn a_few_heads<E: NormEngine>(engine: &E) {
    let problem = head_problem([2, 5, 2, 8], true, Some(2), F32);
    check_heads(engine, problem, Layout::Transposed);
    check_rows(engine, row_problem(9, 17, F32));
}
