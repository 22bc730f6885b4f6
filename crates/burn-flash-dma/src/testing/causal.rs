//! A check that no output of a model depends on later tokens.

use crate::finite::index_of;
use crate::validate::expect;
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Int, Tensor, TensorReadError};
use core::fmt;
use thiserror::Error;

/// Values that replace the tokens from a position on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// The features of the tokens in reverse order, times -1.5, plus 0.25.
    Other,
    /// A single number: ±1e30, in f16 ±6e4.
    Features(f32),
    /// A single token: the least or the greatest of the input.
    Token(i64),
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other => f.write_str("to other features"),
            Self::Features(x) => write!(f, "to features of {x:e}"),
            Self::Token(token) => write!(f, "to token {token}"),
        }
    }
}

/// An output that depends on a later token.
#[derive(Clone, Debug, PartialEq, Error)]
#[error(
    "the output at position {first} depends on later tokens: with the input changed from position {position} on \
     ({change}), {changed} of {len} earlier elements of the output change, most of all {index:?}: {after:e} instead of \
     {before:e} (difference {:e}, allowed {allowed:e})",
    (.after - .before).abs()
)]
pub struct Leak {
    /// Position from which the input was changed: the first one tried that shows the leak.
    pub position: usize,
    /// Values that replaced the input.
    pub change: Change,
    /// First position whose output changed; before `position`.
    pub first: usize,
    /// Index of the element that changed most.
    pub index: Vec<usize>,
    /// Its value before the change.
    pub before: f64,
    /// Its value after the change.
    pub after: f64,
    /// Allowed change.
    pub allowed: f64,
    /// Number of elements before `position` that changed by more than allowed.
    pub changed: usize,
    /// Number of elements before `position`.
    pub len: usize,
}

/// Reasons for which [`try_assert_causal`] refuses a model or an input.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CausalError {
    /// An output depends on later tokens.
    #[error(transparent)]
    Leak(Leak),
    /// There is no earlier or no later token.
    #[error("a check for causality needs a sequence and 2 tokens at least, not {batch} and {len}")]
    Short {
        /// Sequences of the input.
        batch: usize,
        /// Tokens of a sequence.
        len: usize,
    },
    /// All tokens of the input are equal, so they cannot be changed to others of it.
    #[error(
        "a check for causality needs an input of two different tokens at least, and all are {token}"
    )]
    OneToken {
        /// The only token.
        token: i64,
    },
    /// The output is not one row for each token.
    #[error(
        "the output has shape {output:?} instead of [{batch}, {len}, ..]: a row for each token"
    )]
    Shape {
        /// Shape of the output.
        output: Vec<usize>,
        /// Sequences of the input.
        batch: usize,
        /// Tokens of a sequence.
        len: usize,
    },
    /// The output never changed; the model may ignore its input, so the check has shown nothing.
    #[error(
        "no change of the input changed any element of the output: does the model read its argument?"
    )]
    Blind,
    /// The device failed.
    #[error("the output cannot be read: {reason}")]
    Read {
        /// The backend's message.
        reason: String,
    },
}

impl From<TensorReadError> for CausalError {
    fn from(error: TensorReadError) -> Self {
        Self::Read {
            reason: error.to_string(),
        }
    }
}

/// Findings of a check that passed.
#[derive(Clone, Debug, PartialEq)]
pub struct CausalReport {
    /// Positions from which the input was changed.
    pub positions: Vec<usize>,
    /// Changes tried at each position.
    pub changes: Vec<Change>,
    /// Greatest change of an earlier output, relative to the greatest absolute value of the earlier outputs; at most
    /// the tolerance.
    pub worst: f64,
}

mod sealed {
    pub trait Sealed {}

    impl Sealed for super::Tensor<3> {}
    impl Sealed for super::Tensor<2, super::Int> {}
}

/// Inputs of a model: features `[batch, len, features]` as floats, or tokens `[batch, len]` as integers.
pub trait CausalInput: Clone + sealed::Sealed {
    /// Batch and length.
    #[doc(hidden)]
    fn sizes(&self) -> [usize; 2];

    /// Inputs of the same shape that differ in every token, or in as many as possible.
    #[doc(hidden)]
    fn variants(&self) -> Result<Vec<(Change, Self)>, CausalError>;

    /// The first `position` tokens of this input and the others of `late`.
    #[doc(hidden)]
    fn until(&self, position: usize, late: &Self) -> Self;
}

impl CausalInput for Tensor<3> {
    fn sizes(&self) -> [usize; 2] {
        let [batch, len, _] = self.dims();
        [batch, len]
    }

    fn variants(&self) -> Result<Vec<(Change, Self)>, CausalError> {
        let half = self.dtype() == DType::F16;
        let huge = if half { 6e4 } else { 1e30 };
        let filled = |x: f32| (Change::Features(x), self.full_like(x));
        let other = self.clone().flip([1]).mul_scalar(-1.5).add_scalar(0.25);
        Ok(vec![(Change::Other, other), filled(huge), filled(-huge)])
    }

    fn until(&self, position: usize, late: &Self) -> Self {
        join_at(position, self, late)
    }
}

impl CausalInput for Tensor<2, Int> {
    fn sizes(&self) -> [usize; 2] {
        self.dims()
    }

    fn variants(&self) -> Result<Vec<(Change, Self)>, CausalError> {
        let tokens = self.try_to_vec_as::<i64>()?;
        let least = tokens.iter().copied().min().unwrap_or(0);
        let greatest = tokens.iter().copied().max().unwrap_or(0);
        if least == greatest {
            return Err(CausalError::OneToken { token: least });
        }
        let filled = |token: i64| (Change::Token(token), self.full_like(token));
        Ok(vec![filled(least), filled(greatest)])
    }

    fn until(&self, position: usize, late: &Self) -> Self {
        join_at(position, self, late)
    }
}

/// The first `position` tokens of `early` and the others of `late`.
fn join_at<const D: usize, K: Basic>(
    position: usize,
    early: &Tensor<D, K>,
    late: &Tensor<D, K>,
) -> Tensor<D, K> {
    let rest = early.dims()[1] - position;
    let late = late.clone().narrow(1, position, rest);
    Tensor::cat(vec![early.clone().narrow(1, 0, position), late], 1)
}

/// Asserts that no output of a model depends on later tokens: changes `input` from each of several positions on, to
/// other values and to huge ones, and compares the earlier outputs.
///
/// `model` takes `[batch, len, features]` of floats or `[batch, len]` of tokens and returns `[batch, len, ..]`. It
/// must be deterministic, so it must not use dropout. Tokens are changed to the least and the greatest one of
/// `input`. `tolerance` is relative to the greatest absolute value of the compared outputs: a few units of rounding,
/// say 1e-5 in f32 and 2e-2 in bf16, since an attention kernel may sum the earlier keys of a query tile in another
/// order. An output that is NaN must stay NaN, and no other may become NaN: a mask that multiplies later tokens by
/// zero, or subtracts a number from their logits, fails at the huge values.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Selection};
/// use burn_flash_dma::testing::assert_causal;
///
/// let device = Device::flex();
/// let layer = DynamicMaskAttentionConfig::new(32, 4)
///     .with_selection(Selection::keep(8))
///     .init(&device);
/// let x = Tensor::<3>::random([2, 40, 32], Distribution::Normal(0.0, 1.0), &device);
/// assert_causal(|x| layer.forward(x), x, 1e-5);
/// # }
/// ```
///
/// # Panics
///
/// If [`try_assert_causal`] returns an error, with that error's text: it names the first position at which the model
/// leaks, and the element that changes most.
#[track_caller]
pub fn assert_causal<I: CausalInput, const D: usize>(
    model: impl Fn(I) -> Tensor<D>,
    input: I,
    tolerance: f64,
) {
    expect(try_assert_causal(model, input, tolerance));
}

/// Like [`assert_causal`], but returns the error.
///
/// # Errors
///
/// [`CausalError::Leak`] with the first position at which the model leaks; another [`CausalError`] if the input or
/// the output cannot show whether it does.
pub fn try_assert_causal<I: CausalInput, const D: usize>(
    model: impl Fn(I) -> Tensor<D>,
    input: I,
    tolerance: f64,
) -> Result<CausalReport, CausalError> {
    let [batch, len] = input.sizes();
    if batch == 0 || len < 2 {
        return Err(CausalError::Short { batch, len });
    }
    let run = |input: I| -> Result<Output, CausalError> {
        let output = model(input);
        let shape = output.dims();
        if D < 2 || shape[..2] != [batch, len] {
            let output = shape.to_vec();
            return Err(CausalError::Shape { output, batch, len });
        }
        Ok(Output {
            values: output.try_to_vec_as::<f32>()?,
            shape: shape.to_vec(),
        })
    };
    let variants = input.variants()?;
    let clean = run(input.clone())?;
    let mut report = CausalReport {
        positions: positions(len),
        changes: variants.iter().map(|(change, _)| *change).collect(),
        worst: 0.0,
    };
    let mut reads = false;
    for &position in &report.positions {
        for (change, late) in &variants {
            let changed = run(input.until(position, late))?;
            let ratio = clean.compare(&changed, position, *change, tolerance)?;
            report.worst = report.worst.max(ratio);
            reads |= !clean.equals(&changed);
        }
    }
    reads.then_some(report).ok_or(CausalError::Blind)
}

/// The second token, the last, the ends of the quarters, and both sides of a query tile's end.
fn positions(len: usize) -> Vec<usize> {
    let mut positions = vec![1, len / 4, 63, 64, len / 2, 3 * len / 4, len - 1];
    positions.retain(|position| (1..len).contains(position));
    positions.sort_unstable();
    positions.dedup();
    positions
}

struct Output {
    values: Vec<f32>,
    shape: Vec<usize>,
}

impl Output {
    /// Greatest change of a row before `position`, relative to the greatest absolute value there.
    fn compare(
        &self,
        other: &Self,
        position: usize,
        change: Change,
        tolerance: f64,
    ) -> Result<f64, CausalError> {
        let (len, width) = (self.shape[1], self.shape[2..].iter().product::<usize>());
        let token = |at: usize| at / width % len;
        let earlier = || (0..self.values.len()).filter(|&at| token(at) < position);
        let size = |at: usize| f64::from(self.values[at].abs());
        let finite = earlier().map(size).filter(|size| size.is_finite());
        let scale = finite.fold(0.0, f64::max);
        let error = |at: usize| {
            let (before, after) = (self.values[at], other.values[at]);
            if before == after || (before.is_nan() && after.is_nan()) {
                return 0.0;
            }
            let error = (f64::from(before) - f64::from(after)).abs();
            // A number that becomes NaN changes by more than any other.
            if error.is_nan() { f64::INFINITY } else { error }
        };
        let allowed = tolerance * scale;
        let worst = earlier().max_by(|&a, &b| error(a).total_cmp(&error(b)));
        let failed: Vec<usize> = earlier().filter(|&at| error(at) > allowed).collect();
        let Some((worst, first)) = worst.zip(failed.iter().map(|&at| token(at)).min()) else {
            return Ok(match worst.map_or(0.0, error) {
                0.0 => 0.0,
                greatest => greatest / scale,
            });
        };
        Err(CausalError::Leak(Leak {
            position,
            change,
            first,
            index: index_of(worst, &self.shape),
            before: self.values[worst].into(),
            after: other.values[worst].into(),
            allowed,
            changed: failed.len(),
            len: earlier().count(),
        }))
    }

    fn equals(&self, other: &Self) -> bool {
        let bits = |output: &Self| {
            output
                .values
                .iter()
                .map(|x| x.to_bits())
                .collect::<Vec<_>>()
        };
        bits(self) == bits(other)
    }
}
