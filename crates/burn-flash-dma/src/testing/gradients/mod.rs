//! Whether outputs and gradients agree with f64 on the caller's own shapes, element type and device.

mod compare;
mod data;

use crate::{AttentionOptions, try_attention_with_lse, try_dynamic_mask_attention_with_lse};
use burn::tensor::{DType, Device, Tensor};
use compare::{Expected, Gradients, Results};
use core::fmt;
use data::{Data, Values};
use flash_dma_problem::{AttentionError, Problem, TensorName};
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

/// What one comparison of a tensor has found.
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

/// What a check that passed has seen.
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
            let (
                tensor,
                Report {
                    ratio,
                    error,
                    bound,
                    index,
                },
            ) = (c.tensor, &c.worst);
            writeln!(
                f,
                "{tensor}, {}: {} rows, worst {index:?}: error {error:.1e} of {bound:.1e} allowed ({:.0} %)",
                c.sample,
                c.rows,
                100.0 * ratio,
            )?;
        }
        Ok(())
    }
}

/// Why [`try_check_gradients`] fails.
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
        /// What the backend says.
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
        /// The seed of inputs and samples: [`GradientCheck::with_seed`] reproduces the failure.
        seed: u64,
        /// The worst element of each comparison that failed, the worst first.
        failures: Vec<(Sample, Failure)>,
    },
}

fn list(failures: &[(Sample, Failure)]) -> String {
    let line = |(sample, failure): &(Sample, Failure)| format!("{failure} ({sample})");
    failures.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A check of outputs and gradients against f64, and how large its samples are.
///
/// Inputs are drawn from the seed: q, k, v, scores and the gradients of out and lse with mean 0 and standard deviation
/// 1. Two backward passes are run through the crate's functions on tensors, under autodiff:
///
/// 1. with gradients in every row. `out`, `lse` and `dq` are compared at sampled queries; `dk`, `dv` and `dscores` at
///    sampled keys, summed over every query from the `out` and `lse` that were read;
/// 2. with gradients in the sampled rows only. Then `dq`, `dk`, `dv` and `dscores` are known *everywhere*, exactly zero
///    for the most part.
///
/// The first sees a query that is lost in a long sum at the sampled keys, the second what is written where nothing
/// belongs. A wrong row of `out` that was not sampled goes unseen: take another seed.
///
/// The tolerance is that of the project's own tests: 2 times the error of a plain implementation in the same element
/// type on these inputs, 3 times for gradients, and a bound of f32 arithmetic for `lse`.
///
/// Memory on the host is about the size of the outputs and gradients. Time is some `window · head_dim` multiplications
/// for each sampled row and `queries · head_dim` for each sampled key, on every core, beside the passes themselves.
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
/// Where [`try_check_gradients`] returns an error, with its text.
pub fn check_gradients(problem: &Problem, device: &Device) -> GradientReport {
    match try_check_gradients(problem, device) {
        Ok(report) => report,
        Err(error) => panic!("{error}"),
    }
}

/// Runs a [`GradientCheck`] of default size on the problem's shapes, element type and options. Autodiff is added to the
/// device unless it has it.
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

    /// Other inputs and another sample.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Samples `rows` query rows and `keys` keys of each sampled kv head. At least two: the first and the last row are
    /// always in.
    #[must_use]
    pub fn with_samples(mut self, rows: usize, keys: usize) -> Self {
        (self.rows, self.keys) = (rows.max(2), keys.max(2));
        self
    }

    /// Runs the check.
    ///
    /// # Errors
    ///
    /// As [`try_check_gradients`].
    pub fn run(&self, device: &Device) -> Result<GradientReport, GradientError> {
        let p = &self.problem;
        if p.batch == 0 || p.q_len == 0 || p.k_len == 0 {
            return Err(GradientError::Empty);
        }
        let data = Data::new(p, self.seed);
        let device = device.clone().autodiff();
        let rows = data.choose_rows(self.heads, self.rows);
        let (out, lse, whole) = passes(&data, &device, None)?;
        let (_, _, of_rows) = passes(&data, &device, Some(&rows))?;
        let results = Results {
            out,
            lse,
            whole,
            of_rows,
        };
        let expected = Expected::new(&data, &rows, self.keys, &results);
        let (checked, failures) = expected.compare(p, &results);
        match failures.is_empty() {
            true => Ok(GradientReport {
                seed: self.seed,
                checked,
            }),
            false => Err(GradientError::Wrong {
                seed: self.seed,
                failures,
            }),
        }
    }
}

/// Output, LSE and gradients of a forward and a backward pass, with gradients of the outputs in all rows or in `only`.
fn passes(
    data: &Data,
    device: &Device,
    only: Option<&[usize]>,
) -> Result<(Values, Values, Gradients), GradientError> {
    let p = &data.problem;
    let [q, k, v] = [data.q(device), data.k(device), data.v(device)].map(Tensor::require_grad);
    let scores = data.scores(device).map(Tensor::require_grad);
    let options = AttentionOptions {
        keep_window: p.has_scores.then_some(p.window),
        causal: p.causal,
        scale: Some(p.scale),
        softcap: p.softcap,
        deterministic: p.deterministic,
    };
    let inputs = (q.clone(), k.clone(), v.clone());
    let (out, lse) = match scores.clone() {
        Some(z) => try_dynamic_mask_attention_with_lse(inputs.0, inputs.1, inputs.2, z, options),
        None => try_attention_with_lse(inputs.0, inputs.1, inputs.2, options),
    }?;
    // The sums may overflow the element type; their gradients do not.
    let weighted = (out.clone() * data.grad_out(device, only))
        .sum()
        .cast(DType::F32);
    let loss = weighted + (lse.clone() * data.grad_lse(device, only)).sum();
    let out = data::read(TensorName::Out, out)?;
    let lse = data::read(TensorName::Lse, lse)?;
    let mut grads = loss.backward();
    let mut grad = |tensor: TensorName, input: &Tensor<4>| {
        let grad = input.grad_remove(&mut grads);
        data::read(tensor, grad.ok_or(GradientError::Missing { tensor })?)
    };
    let q = grad(TensorName::GradQuery, &q)?;
    let k = grad(TensorName::GradKey, &k)?;
    let v = grad(TensorName::GradValue, &v)?;
    let tensor = TensorName::GradScores;
    let scores = match scores {
        None => None,
        Some(z) => {
            let grad = z.grad_remove(&mut grads);
            Some(data::read(
                tensor,
                grad.ok_or(GradientError::Missing { tensor })?,
            )?)
        }
    };
    Ok((out, lse, Gradients { q, k, v, scores }))
}
