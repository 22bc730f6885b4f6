//! The tolerance rule, and the report of a failure.
//!
//! An element passes if its error against f64 is at most
//!
//! > `factor` × the greatest error of the [naive](crate::Inputs::naive_forward) implementation in
//! > this tensor + one unit in the last place of the element itself + [`ARITHMETIC`] f32 epsilons of
//! > the element's [magnitude](Exact::magnitude)
//!
//! with `factor` 2 for outputs and 3 for gradients. The last two terms are a floor for cases where the naive
//! implementation is right by luck: with one key, for example, its probability is exactly 1 and its error 0, yet an
//! engine must round its result and may sum in another order. They follow from the computation of each element (its
//! terms and their cancellation), so they do not grow where an element is small for another reason. An error below
//! [`UNDERFLOW`] is ignored. NaN and ±∞ must be where f64 has them, and an element that no pair contributes to must be
//! exactly 0.

use crate::round::epsilon;
use core::fmt;
use flash_dma_problem::ElementType;

/// Epsilons of f32 arithmetic granted per magnitude: the first-order bounds of a dot product, an
/// exponential, a division and a sum of rounded terms of random sign stay below it together.
pub const ARITHMETIC: f64 = 4.0;

/// Products of 16-bit elements that [`ARITHMETIC`] covers on tensor cores. They add 16 products at a time to an f32 sum
/// and cut off the excess bits instead of rounding (M. Fasi, N. Higham, M. Mikaitis, S. Pranesh, "Numerical behavior of
/// NVIDIA tensor cores", 2021): up to an epsilon each time, all towards zero. For longer rows the magnitude of a
/// product is counted once per such part.
pub const CUT_OFF: usize = 64;

/// The size below which values vanish in f32: a probability below 1e-38 is 0 there, and so is its contribution to a
/// gradient, which is the probability times the other factors of a term. No other number of a problem is as small.
pub const UNDERFLOW: f64 = 1e-30;

/// Factor on the naive implementation's error for outputs.
pub const OUTPUT: f64 = 2.0;

/// Factor on the naive implementation's error for gradients.
pub const GRADIENT: f64 = 3.0;

/// A tensor in f64, and the error that f32 arithmetic must be allowed.
#[derive(Clone, Debug)]
pub struct Exact {
    /// The values.
    pub values: Vec<f64>,
    /// For each element the sum of the absolute values of all its terms, including terms that cancel, times the
    /// sensitivity of its probabilities (1 + the size of the logits' terms). Exactly 0 if no pair contributes.
    pub magnitude: Vec<f64>,
}

impl Exact {
    pub(crate) fn zeros(len: usize) -> Self {
        Self {
            values: vec![0.0; len],
            magnitude: vec![0.0; len],
        }
    }

    /// Adds a pair's contribution; a contribution of 0 still marks the element as touched.
    pub(crate) fn add(&mut self, at: usize, value: f64, magnitude: f64) {
        self.values[at] += value;
        self.magnitude[at] += magnitude + f64::MIN_POSITIVE;
    }

    /// Adds `weight` times a row from element `at` on, and `size` times its absolute values to the magnitude.
    pub(crate) fn add_row(&mut self, at: usize, weight: f64, size: f64, row: &[f64]) {
        let end = at + row.len();
        let values = self.values[at..end].iter_mut();
        let sums = values.zip(&mut self.magnitude[at..end]);
        for ((value, magnitude), x) in sums.zip(row) {
            *value += weight * x;
            *magnitude += size * x.abs() + f64::MIN_POSITIVE;
        }
    }
}

/// Adds two gradients of one tensor, each exact and naive.
#[must_use]
pub fn sum(
    (mut exact, mut naive): (Exact, Vec<f64>),
    more: &(Exact, Vec<f64>),
) -> (Exact, Vec<f64>) {
    let add = |to: &mut [f64], more: &[f64]| {
        to.iter_mut().zip(more).for_each(|(to, more)| *to += more);
    };
    add(&mut exact.values, &more.0.values);
    add(&mut exact.magnitude, &more.0.magnitude);
    add(&mut naive, &more.1);
    (exact, naive)
}

/// The worst element of a tensor that passed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Greatest error over its bound, so at most 1.
    pub ratio: f64,
    /// The error of that element.
    pub error: f64,
    /// Its bound.
    pub bound: f64,
    /// Its index; empty if every element is exact.
    pub index: Vec<usize>,
}

/// The worst element of a tensor that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The tensor's name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Index of the worst element; empty if the sizes differ.
    pub index: Vec<usize>,
    /// The engine's value.
    pub actual: f64,
    /// The oracle's value.
    pub exact: f64,
    /// The error allowed there.
    pub bound: f64,
    /// Number of elements out of bounds.
    pub failed: usize,
    /// Number of elements of the tensor.
    pub len: usize,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            shape,
            index,
            actual,
            exact,
            bound,
            failed,
            len,
        } = self;
        write!(
            f,
            "{name} {shape:?}: {failed} of {len} elements are wrong, the worst at {index:?}: \
             {actual:e} instead of {exact:e} (error {:e}, allowed {bound:e})",
            (actual - exact).abs()
        )
    }
}

impl core::error::Error for Failure {}

/// The greatest error of the naive implementation in a tensor, where both it and f64 are finite.
#[must_use]
pub fn naive_error(exact: &Exact, naive: &[f64]) -> f64 {
    let pairs = exact.values.iter().zip(naive);
    let errors = pairs.map(|(exact, naive)| (exact - naive).abs());
    errors.filter(|error| error.is_finite()).fold(0.0, f64::max)
}

/// Compares an engine's tensor by the rule of this module.
///
/// # Errors
///
/// The worst element, if one is out of bounds. A length that does not match the shape fails as well.
pub fn compare(
    name: &str,
    shape: &[usize],
    actual: &[f64],
    exact: &Exact,
    naive: &[f64],
    element: ElementType,
    factor: f64,
) -> Result<Report, Failure> {
    let error = naive_error(exact, naive);
    compare_by(name, shape, actual, exact, error, element, factor)
}

/// [`compare()`] with a given [`naive_error`]: a tensor that is mostly NaN has too few elements to measure it.
///
/// # Errors
///
/// The errors of [`compare()`].
pub fn compare_by(
    name: &str,
    shape: &[usize],
    actual: &[f64],
    exact: &Exact,
    naive_error: f64,
    element: ElementType,
    factor: f64,
) -> Result<Report, Failure> {
    check(name, shape, actual, exact, |value, magnitude| {
        factor * naive_error
            + epsilon(element) * value.abs()
            + ARITHMETIC * f64::from(f32::EPSILON) * magnitude
    })
}

/// Compares an LSE. It is f32 arithmetic on the given inputs regardless of their type, so it is only granted the error
/// of the arithmetic itself: [`ARITHMETIC`] epsilons of the size of its logits' terms.
///
/// # Errors
///
/// The errors of [`compare()`].
pub fn compare_lse(shape: &[usize], actual: &[f64], exact: &Exact) -> Result<Report, Failure> {
    check("lse", shape, actual, exact, of_arithmetic)
}

/// Compares probabilities. Like an LSE they are f32 arithmetic on the given inputs and are granted only its error: a
/// pair that is not attended to has exactly 0.
///
/// # Errors
///
/// The errors of [`compare()`].
pub fn compare_probabilities(
    shape: &[usize],
    actual: &[f64],
    exact: &Exact,
) -> Result<Report, Failure> {
    check("the probabilities", shape, actual, exact, of_arithmetic)
}

/// The bound of an f32 that is made by f32 arithmetic alone.
fn of_arithmetic(value: f64, magnitude: f64) -> f64 {
    f64::from(f32::EPSILON) * (value.abs() + ARITHMETIC * magnitude)
}

fn check(
    name: &str,
    shape: &[usize],
    actual: &[f64],
    exact: &Exact,
    bound: impl Fn(f64, f64) -> f64,
) -> Result<Report, Failure> {
    let len = shape.iter().product();
    let failure = |at: Option<usize>, bound: f64, failed: usize| Failure {
        name: name.into(),
        shape: shape.into(),
        index: at.map_or(Vec::new(), |at| unravel(at, shape)),
        actual: at.map_or(actual.len() as f64, |at| actual[at]),
        exact: at.map_or(exact.values.len() as f64, |at| exact.values[at]),
        bound,
        failed,
        len,
    };
    if actual.len() != len || exact.values.len() != len {
        return Err(failure(None, 0.0, len));
    }
    let mut worst = Report::default();
    let (mut worst_at, mut failed) = (None, 0);
    for (at, (&actual, &value)) in actual.iter().zip(&exact.values).enumerate() {
        let error = (actual - value).abs();
        let allowed = match exact.magnitude[at] {
            0.0 => 0.0,
            magnitude => bound(value, magnitude) + UNDERFLOW,
        };
        let ratio = if !value.is_finite() {
            let same = actual == value || (actual.is_nan() && value.is_nan());
            if same { 0.0 } else { f64::INFINITY }
        } else if error == 0.0 {
            0.0
        } else if error.is_nan() || allowed.is_nan() {
            f64::INFINITY
        } else {
            error / allowed
        };
        failed += usize::from(ratio > 1.0);
        if ratio > worst.ratio {
            worst = Report {
                ratio,
                error,
                bound: allowed,
                index: Vec::new(),
            };
            worst_at = Some(at);
        }
    }
    if failed > 0 {
        return Err(failure(worst_at, worst.bound, failed));
    }
    worst.index = worst_at.map_or(Vec::new(), |at| unravel(at, shape));
    Ok(worst)
}

/// The index of a flat offset.
pub(crate) fn unravel(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &n) in index.iter_mut().zip(shape).rev() {
        *i = at % n;
        at /= n;
    }
    index
}
