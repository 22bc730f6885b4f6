//! The findings of a check.

use core::fmt;
use flash_dma_problem::{AttentionError, TensorName};
use flash_dma_reference::{Failure, Report};

/// Which elements of a tensor were compared, and under which gradients of the outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// Query rows.
    Rows,
    /// Every element, where only the sampled query rows have gradients: those that these rows do not touch are exactly
    /// zero.
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

/// The finding of one comparison of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// Which tensor.
    pub tensor: TensorName,
    /// Which part of it.
    pub sample: Sample,
    /// How many rows were compared with f64.
    pub rows: usize,
    /// The worst element: error, allowed error, their ratio, and its index in the tensor.
    pub worst: Report,
}

/// The findings of a check that passed.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientReport {
    /// The seed of inputs and samples.
    pub seed: u64,
    /// Every comparison.
    pub checked: Vec<Checked>,
}

impl GradientReport {
    /// The comparison that came nearest to its bound.
    ///
    /// # Panics
    ///
    /// Never for a report of a check: it has compared something.
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

/// The reasons for which [`try_check_gradients`](super::try_check_gradients) fails.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GradientError {
    /// The problem is refused.
    #[error(transparent)]
    Refused(#[from] AttentionError),
    /// There is nothing to compare.
    #[error("a check of gradients needs a sequence, a query and a key at least")]
    Empty,
    /// The device failed.
    #[error("{tensor} cannot be read: {reason}")]
    Read {
        /// The first tensor that could not be read.
        tensor: TensorName,
        /// The backend's message.
        reason: String,
    },
    /// A tensor got no gradient at all.
    #[error("the backward pass left out {tensor}")]
    Missing {
        /// Which gradient.
        tensor: TensorName,
    },
    /// Elements are out of bounds.
    #[error("seed {seed}: {}", list(failures))]
    Wrong {
        /// The seed of inputs and samples: [`GradientCheck::with_seed`](super::GradientCheck::with_seed) reproduces the failure.
        seed: u64,
        /// The worst element of each comparison that failed, the worst first.
        failures: Vec<(Sample, Failure)>,
    },
}

fn list(failures: &[(Sample, Failure)]) -> String {
    let line = |(sample, failure): &(Sample, Failure)| format!("{failure} ({sample})");
    failures.iter().map(line).collect::<Vec<_>>().join("\n")
}
