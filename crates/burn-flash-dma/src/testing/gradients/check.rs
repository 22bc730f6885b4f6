//! The check: inputs, passes and comparison.

use super::compare::Expected;
use super::data::Data;
use super::passes::Results;
use super::report::{GradientError, GradientReport};
use crate::validate::expect;
use burn::tensor::Device;
use flash_dma_problem::Problem;

/// A check of outputs and gradients against f64, and the size of its samples.
///
/// The seed determines the inputs: q, k, v, scores and the gradients of out and lse, with mean 0 and standard
/// deviation 1. Two backward passes run through the crate's functions on tensors, under autodiff:
///
/// 1. with gradients in every row. `out`, `lse` and `dq` are compared at sampled queries; `dk`, `dv` and `dscores` at
///    sampled keys, summed over every query from the `out` and `lse` that were read, in 16 bits with the residual of
///    `out`;
/// 2. with gradients only in the sampled rows. Then `dq`, `dk`, `dv` and `dscores` are known *everywhere*, and are
///    mostly exactly zero.
///
/// The first detects a query lost in a long sum at the sampled keys, the second anything written where nothing
/// belongs. A wrong row of `out` that was not sampled goes unseen: try another seed.
///
/// Tolerances are those of the project's own tests: 2 times the error of a plain implementation in the same element
/// type on these inputs, 3 times for gradients, and a bound of f32 arithmetic for `lse`.
///
/// Host memory is about the size of the outputs and gradients. Besides the passes, time is some `window · head_dim`
/// multiplications for each sampled row and `queries · head_dim` for each sampled key, on every core.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientCheck {
    problem: Problem,
    seed: u64,
    heads: usize,
    rows: usize,
    keys: usize,
}

/// [`try_check_gradients`] for a test.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_flash_dma::testing::check_gradients;
/// use burn_flash_dma::{AttentionOptions, ElementType, Problem};
///
/// // 4 query heads share 2 kv heads; 7 queries after 293 cached keys.
/// let (q, kv) = ([1, 4, 7, 64], [1, 2, 300, 64]);
/// let options = AttentionOptions::new().with_keep_window(50);
/// let problem = Problem::new(&q, &kv, &kv, Some(&kv[..3]), ElementType::F32, &options)?;
/// let report = check_gradients(&problem, &Device::flex());
/// println!("{report}");
/// # }
/// # Ok::<(), burn_flash_dma::AttentionError>(())
/// ```
///
/// # Panics
///
/// If [`try_check_gradients`] returns an error, with that error's text.
pub fn check_gradients(problem: &Problem, device: &Device) -> GradientReport {
    expect(try_check_gradients(problem, device))
}

/// Runs a [`GradientCheck`] of default size on the problem's shapes, element type and options. Adds autodiff to the
/// device if it is missing.
///
/// # Errors
///
/// [`GradientError`]: the problem is refused or empty, the device fails, or an element is out of bounds.
pub fn try_check_gradients(
    problem: &Problem,
    device: &Device,
) -> Result<GradientReport, GradientError> {
    GradientCheck::new(problem).run(device)
}

impl GradientCheck {
    /// Seed 0; 8 query rows of each of 8 kv heads; 32 keys of each of 2 kv heads.
    #[must_use]
    pub fn new(problem: &Problem) -> Self {
        Self {
            problem: *problem,
            seed: 0,
            heads: 8,
            rows: 8,
            keys: 32,
        }
    }

    /// With inputs and a sample drawn from another seed.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Samples `rows` query rows and `keys` keys of each sampled kv head, at least two: the first and the last row
    /// are always included.
    #[must_use]
    pub fn with_samples(mut self, rows: usize, keys: usize) -> Self {
        (self.rows, self.keys) = (rows.max(2), keys.max(2));
        self
    }

    /// Runs the check.
    ///
    /// # Errors
    ///
    /// See [`try_check_gradients`].
    pub fn run(&self, device: &Device) -> Result<GradientReport, GradientError> {
        let p = &self.problem;
        if p.batch == 0 || p.q_len == 0 || p.k_len == 0 {
            return Err(GradientError::Empty);
        }
        let data = Data::new(p, self.seed);
        let device = device.clone().autodiff();
        let rows = data.choose_rows(self.heads, self.rows);
        let results = Results::new(&data, &rows, &device)?;
        let expected = Expected::new(&data, &rows, self.keys, &results);
        let (checked, failures) = expected.compare(p, &results);
        let seed = self.seed;
        match failures.is_empty() {
            true => Ok(GradientReport { seed, checked }),
            false => Err(GradientError::Wrong { seed, failures }),
        }
    }
}
