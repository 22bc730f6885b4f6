//! Norms and rotary encoding: their calls, and the engines.

#[cfg(feature = "burn")]
mod burn;
mod cpu;
#[cfg(feature = "kernels")]
mod kernels;

use crate::{Engine, Layout, Raw, Refused};
use flash_dma_problem::{ElementType, NormProblem};
use flash_dma_reference::compare::{GRADIENT, OUTPUT, compare};
use flash_dma_reference::generate::normal;
use flash_dma_reference::norm::Norm;
use flash_dma_reference::{Exact, Rng};

/// Burn's operation for a problem; the engines have one for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The RMS norm of rows.
    Rows,
    /// The heads of q or k.
    Heads,
}

/// A call of the forward and the backward pass.
#[derive(Clone, Debug)]
pub struct NormCall {
    /// Sizes and options.
    pub problem: NormProblem,
    /// The operation.
    pub operation: Operation,
    /// `[batch, len, heads, width]`.
    pub x: Raw,
    /// `[width]`.
    pub gamma: Option<Vec<f64>>,
    /// `[positions, width / 2, 2]`.
    pub table: Option<Raw>,
    /// The gradient of the output, `[batch, heads, len, width]`.
    pub grad_out: Raw,
    /// The layout of the results that have one.
    pub layout: Layout,
}

/// The results of both passes, contiguous.
#[derive(Clone, Debug, PartialEq)]
pub struct NormResults {
    /// `[batch, heads, len, width]`.
    pub out: Vec<f64>,
    /// The gradient of `x`, `[batch, len, heads, width]`.
    pub x: Vec<f64>,
    /// The gradient of gamma, `[width]`; given exactly if there is a norm.
    pub gamma: Option<Vec<f64>>,
}

/// An implementation of norms and rotary encoding.
pub trait NormEngine: Engine {
    /// The forward pass and then the backward pass; an error is the engine's refusal.
    fn norm(&self, call: &NormCall) -> Result<NormResults, Refused>;
}

impl NormCall {
    /// The call of the oracle's inputs.
    pub fn new(inputs: &Norm, operation: Operation, layout: Layout, grad_out: &[f64]) -> Self {
        let p = inputs.problem;
        Self {
            problem: p,
            operation,
            x: Raw::new(&inputs.x, &p.x_shape(), p.element, layout),
            gamma: inputs.gamma.clone(),
            table: (inputs.table.as_ref())
                .zip(p.table_shape())
                .map(|(table, shape)| Raw::new(table, &shape, ElementType::F32, layout)),
            grad_out: Raw::new(grad_out, &p.out_shape(), p.element, layout),
            layout,
        }
    }
}

/// A random gradient of the output, of the problem's element type.
pub fn grad_out(problem: &NormProblem, seed: u64) -> Vec<f64> {
    let len = problem.out_shape().iter().product();
    normal(len, 1.0, problem.element, &mut Rng::new(seed ^ 0x5eed))
}

/// Runs both passes on an engine and compares everything with the oracle; nothing if the device lacks the type.
pub fn check<E: NormEngine>(engine: &E, inputs: &Norm, operation: Operation, layout: Layout) {
    let p = &inputs.problem;
    if !engine.supports(p.element) {
        return;
    }
    let grad_out = grad_out(p, 7);
    let call = NormCall::new(inputs, operation, layout, &grad_out);
    let what = format!("{} {layout:?} {p:?}", E::NAME);
    let results = engine.norm(&call);
    let results = results.unwrap_or_else(|refused| panic!("{what}: {}", refused.error));
    let agree =
        |name, shape: &[usize], actual: &[f64], exact: &Exact, naive: &[f64], element, factor| {
            compare(name, shape, actual, exact, naive, element, factor)
                .unwrap_or_else(|failure| panic!("{what}: {failure}"));
        };
    let (exact, naive) = (inputs.forward(), inputs.naive_forward());
    let shape = p.out_shape();
    agree(
        "out",
        &shape,
        &results.out,
        &exact,
        &naive,
        p.element,
        OUTPUT,
    );
    let (exact, naive) = (inputs.backward(&grad_out), inputs.naive_backward(&grad_out));
    let shape = p.x_shape();
    agree(
        "dx", &shape, &results.x, &exact.x, &naive.x, p.element, GRADIENT,
    );
    assert_eq!(results.gamma.is_some(), exact.gamma.is_some(), "{what}");
    if let (Some(actual), Some(exact), Some(naive)) = (&results.gamma, &exact.gamma, &naive.gamma) {
        agree(
            "dgamma",
            &[p.width],
            actual,
            exact,
            naive,
            p.gamma,
            GRADIENT,
        );
    }
}

/// `[batch, len, heads, width]` to `[batch, heads, len, width]`.
pub(crate) fn heads_first(values: &[f64], problem: &NormProblem) -> Vec<f64> {
    let [batch, len, heads, width] = problem.x_shape();
    let mut moved = Vec::with_capacity(values.len());
    for b in 0..batch {
        for h in 0..heads {
            for n in 0..len {
                let at = ((b * len + n) * heads + h) * width;
                moved.extend_from_slice(&values[at..at + width]);
            }
        }
    }
    moved
}
