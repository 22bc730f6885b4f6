//! What a call should give by the oracle, and the comparison with what an engine gave.

use crate::Outputs;
use core::fmt;
use flash_dma_problem::{ElementType, Problem};
use flash_dma_reference::compare::{GRADIENT, OUTPUT, compare_by, compare_lse, naive_error};
use flash_dma_reference::round::round;
use flash_dma_reference::{Exact, Forward, NaiveForward};

/// One tensor of a result.
#[derive(Clone, Debug)]
struct Tensor {
    name: &'static str,
    shape: Vec<usize>,
    element: ElementType,
    factor: f64,
    exact: Exact,
    naive_error: f64,
}

/// What a call should give.
#[derive(Clone, Debug)]
pub struct Expected {
    /// `out`, then the gradients in the order in which they were added.
    tensors: Vec<Tensor>,
    lse_shape: [usize; 3],
    lse: Exact,
}

impl Expected {
    /// Outputs, without gradients.
    #[must_use]
    pub fn new(problem: &Problem, exact: Forward, naive: &NaiveForward) -> Self {
        let out = Tensor {
            name: "out",
            shape: problem.q_shape().into(),
            element: problem.element,
            factor: OUTPUT,
            naive_error: naive_error(&exact.out, &naive.out),
            exact: exact.out,
        };
        Self {
            tensors: vec![out],
            lse_shape: problem.lse_shape(),
            lse: exact.lse,
        }
    }

    /// Adds a gradient.
    pub fn gradient(
        &mut self,
        name: &'static str,
        shape: &[usize],
        element: ElementType,
        exact: Exact,
        naive: &[f64],
    ) {
        self.tensors.push(Tensor {
            name,
            shape: shape.into(),
            element,
            factor: GRADIENT,
            naive_error: naive_error(&exact, naive),
            exact,
        });
    }

    /// Compares outputs and gradients, these in the order in which they were added. NaN, or few pairs, leave few
    /// elements to measure the naive implementation by: its errors at `others`, inputs of the same kind, count, too.
    ///
    /// # Panics
    ///
    /// With `what`, and the worst element of every tensor that is wrong.
    pub fn check(
        &self,
        others: &[Self],
        outputs: &Outputs,
        gradients: &[&[f64]],
        what: impl fmt::Display,
    ) {
        if let Err(failures) = self.compare(others, outputs, gradients) {
            panic!("{what}:\n{failures}");
        }
    }

    /// As [`check`](Self::check), for those who go on.
    ///
    /// # Errors
    ///
    /// The worst element of every tensor that is wrong, a line each.
    ///
    /// # Panics
    ///
    /// If there are not as many gradients as were added.
    pub fn compare(
        &self,
        others: &[Self],
        outputs: &Outputs,
        gradients: &[&[f64]],
    ) -> Result<(), String> {
        assert_eq!(gradients.len() + 1, self.tensors.len(), "gradients");
        let mut failures = Vec::new();
        let actual = [&outputs.out[..]]
            .into_iter()
            .chain(gradients.iter().copied());
        for (n, actual) in actual.enumerate() {
            let errors = [self].into_iter().chain(others);
            let naive_error = errors.map(|x| x.tensors[n].naive_error).fold(0.0, f64::max);
            let Tensor {
                name,
                shape,
                element,
                factor,
                exact,
                ..
            } = &self.tensors[n];
            failures.extend(
                compare_by(name, shape, actual, exact, naive_error, *element, *factor).err(),
            );
        }
        failures.extend(compare_lse(&self.lse_shape, &outputs.lse, &self.lse).err());
        let failures: Vec<String> = failures.iter().map(ToString::to_string).collect();
        match failures.is_empty() {
            true => Ok(()),
            false => Err(failures.join("\n")),
        }
    }

    /// Whether a finite element is, to a hundredth, past the greatest of its type: what an engine gives for it says
    /// nothing.
    #[must_use]
    pub fn exceeds_its_type(&self) -> bool {
        self.tensors.iter().any(|tensor| {
            let past = |x: &f64| x.is_finite() && round(1.01 * x, tensor.element).is_infinite();
            tensor.exact.values.iter().any(past)
        })
    }
}
