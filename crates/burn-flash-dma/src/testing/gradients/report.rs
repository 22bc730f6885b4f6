//! Findings of a check.

use core::fmt;
use flash_dma_problem::{AttentionError, TensorName};
use flash_dma_reference::{Failure, Report};

/// The compared elements of a tensor, and the rows with output gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// Query rows.
    Rows,
    /// Every element, with output gradients only in the sampled query rows: elements that these rows do not reach are
    /// exactly zero.
    OfRows,
    /// Keys, their gradients summed over every query that attends to them.
    Keys,
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rows => "sampled queries",
            Self::OfRows => "gradients of the sampled queries alone",
            Self::Keys => "sampled keys",
        })
    }
}

/// Finding of one comparison of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// The tensor.
    pub tensor: TensorName,
    /// The compared elements.
    pub sample: Sample,
    /// Number of rows compared with f64.
    pub rows: usize,
    /// Worst element: error, allowed error, their ratio, and its index in the tensor.
    pub worst: Report,
}

/// Findings of a check that passed.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientReport {
    /// Seed of inputs and samples.
    pub seed: u64,
    /// All comparisons.
    pub checked: Vec<Checked>,
}

impl GradientReport {
    /// The comparison nearest to its bound.
    ///
    /// # Panics
    ///
    /// Never: a report of a check has at least one comparison.
    #[must_use]
    pub fn worst(&self) -> &Checked {
        let ratio = |a: &&Checked, b: &&Checked| a.worst.ratio.total_cmp(&b.worst.ratio);
        (self.checked.iter())
            .max_by(ratio)
            .expect("a check compares every tensor")
    }
}

impl fmt::Display for GradientReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in &self.checked {
            let (worst, percent) = (&c.worst, 100.0 * c.worst.ratio);
            write!(
                f,
                "{}, {}: {} rows, worst {:?}: ",
                c.tensor, c.sample, c.rows, worst.index
            )?;
            let (error, bound) = (worst.error, worst.bound);
            writeln!(
                f,
                "error {error:.1e} of {bound:.1e} allowed ({percent:.0} %)"
            )?;
        }
        Ok(())
    }
}

/// Reasons for which [`try_check_gradients`](super::try_check_gradients) fails.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GradientError {
    /// The problem is refused.
    #[error(transparent)]
    Refused(#[from] AttentionError),
    /// The problem has nothing to compare.
    #[error("a check of gradients needs a sequence, a query and a key at least")]
    Empty,
    /// The device failed.
    #[error("{tensor} cannot be read: {reason}")]
    Read {
        /// First tensor that could not be read.
        tensor: TensorName,
        /// The backend's message.
        reason: String,
    },
    /// A tensor got no gradient at all.
    #[error("the backward pass left out {tensor}")]
    Missing {
        /// The tensor.
        tensor: TensorName,
    },
    /// Elements are out of bounds.
    #[error("seed {seed}: {}", list(failures))]
    Wrong {
        /// Seed of inputs and samples: [`GradientCheck::with_seed`](super::GradientCheck::with_seed) reproduces the
        /// failure.
        seed: u64,
        /// Worst element of each failed comparison, the worst first.
        failures: Vec<(Sample, Failure)>,
    },
}

fn list(failures: &[(Sample, Failure)]) -> String {
    let line = |(sample, failure): &(Sample, Failure)| format!("{failure} ({sample})");
    failures.iter().map(line).collect::<Vec<_>>().join("\n")
}
