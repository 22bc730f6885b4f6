//! Random inputs as a function of the row, so that no copy stays on the host, and tensors that were read.

use super::report::GradientError;
use burn::tensor::{Device, Element, Tensor, TensorData, bf16, f16};
use flash_dma_problem::{ElementType, Problem, TensorName};
use flash_dma_reference::sampled::{ReadRow, Source, reader};
use flash_dma_reference::{Rng, round::round};
use std::thread;

/// Inputs of a check.
pub struct Data {
    pub problem: Problem,
    pub seed: u64,
    scores: Option<Vec<f32>>,
    grad_lse: Vec<f32>,
}

/// A tensor that was read.
pub enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Values {
    pub fn row(&self, row: usize, into: &mut [f64]) {
        match self {
            Self::F32(values) => reader(values)(row, into),
            Self::F16(values) => reader(values)(row, into),
            Self::Bf16(values) => reader(values)(row, into),
        }
    }
}

pub fn read<const D: usize>(name: TensorName, tensor: Tensor<D>) -> Result<Values, GradientError> {
    let element = crate::validate::element_type(name, &tensor)?;
    let values = match element {
        ElementType::F32 => tensor.try_into_vec_as().map(Values::F32),
        ElementType::F16 => tensor.try_into_vec_as().map(Values::F16),
        ElementType::Bf16 => tensor.try_into_vec_as().map(Values::Bf16),
    };
    values.map_err(|error| GradientError::Read {
        tensor: name,
        reason: error.to_string(),
    })
}

/// Fills a row with numbers of mean 0 and standard deviation 1, bell-shaped without tails: half a million rows take a
/// second.
fn fill(seed: u64, tensor: TensorName, row: usize, element: ElementType, into: &mut [f64]) {
    let mut rng = row_rng(seed, tensor, row);
    for x in into {
        *x = round(bell(&mut rng), element);
    }
}

fn row_rng(seed: u64, tensor: TensorName, row: usize) -> Rng {
    let stream = Rng::new(seed ^ ((tensor as u64) << 56)).next_u64();
    Rng::new(Rng::new(stream.wrapping_add(row as u64)).next_u64())
}

/// The sum of four 16-bit numbers, centred and scaled.
fn bell(rng: &mut Rng) -> f64 {
    let bits = rng.next_u64();
    let sum: u64 = (0..4).map(|n| (bits >> (16 * n)) & 0xffff).sum();
    (sum as f64 - 2.0 * 65535.0) / (65536.0 / 3f64.sqrt())
}

impl Data {
    pub fn new(problem: &Problem, seed: u64) -> Self {
        let p = problem;
        let flat = |tensor, len: usize| {
            let mut rng = row_rng(seed, tensor, 0);
            (0..len).map(|_| bell(&mut rng) as f32).collect()
        };
        Self {
            problem: *p,
            seed,
            scores: (p.has_scores)
                .then(|| flat(TensorName::Scores, p.scores_shape().iter().product())),
            grad_lse: flat(TensorName::GradLse, p.lse_shape().iter().product()),
        }
    }

    pub fn choose_rows(&self, heads: usize, per_head: usize) -> Vec<usize> {
        let mut rng = Rng::new(self.seed);
        self.with_source(|source| source.choose_rows(heads, per_head, &mut rng))
    }

    /// Calls `f` with the inputs as the oracle reads them.
    pub fn with_source<R>(&self, f: impl FnOnce(&Source) -> R) -> R {
        let row = |tensor: TensorName| {
            move |row: usize, into: &mut [f64]| {
                fill(self.seed, tensor, row, self.problem.element, into);
            }
        };
        f(&Source {
            problem: self.problem,
            q: &row(TensorName::Query),
            k: &row(TensorName::Key),
            v: &row(TensorName::Value),
            scores: self.scores.as_deref(),
            grad_out: &row(TensorName::GradOut),
            grad_lse: Some(&self.grad_lse),
        })
    }

    /// q, k and v.
    pub fn rows(&self, device: &Device) -> [Tensor<4>; 3] {
        let (q_shape, kv_shape) = (self.problem.q_shape(), self.problem.kv_shape());
        [
            self.upload(device, q_shape, |s| s.q, None),
            self.upload(device, kv_shape, |s| s.k, None),
            self.upload(device, kv_shape, |s| s.v, None),
        ]
    }

    /// Gradient of `out`, zero except in the rows `only`.
    pub fn grad_out(&self, device: &Device, only: Option<&[usize]>) -> Tensor<4> {
        self.upload(device, self.problem.q_shape(), |s| s.grad_out, only)
    }

    /// Gradient of `lse`, zero except in the rows `only`.
    pub fn grad_lse(&self, device: &Device, only: Option<&[usize]>) -> Tensor<3> {
        let mut values = self.grad_lse.clone();
        if let Some(rows) = only {
            values.fill(0.0);
            for &row in rows {
                values[row] = self.grad_lse[row];
            }
        }
        on_device(values, self.problem.lse_shape(), device)
    }

    pub fn scores(&self, device: &Device) -> Option<Tensor<3>> {
        let shape = self.problem.scores_shape();
        Some(on_device(self.scores.clone()?, shape, device))
    }

    fn upload(
        &self,
        device: &Device,
        shape: [usize; 4],
        tensor: for<'a> fn(&Source<'a>) -> ReadRow<'a>,
        only: Option<&[usize]>,
    ) -> Tensor<4> {
        self.with_source(|source| {
            let tensor = tensor(source);
            match self.problem.element {
                ElementType::F32 => on_device(values::<f32>(tensor, shape, only), shape, device),
                ElementType::F16 => on_device(values::<f16>(tensor, shape, only), shape, device),
                ElementType::Bf16 => on_device(values::<bf16>(tensor, shape, only), shape, device),
            }
        })
    }
}

fn on_device<E: Element, const D: usize>(
    values: Vec<E>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (device, E::dtype()))
}

/// A tensor in memory, zero except in the rows `only`.
fn values<E: Element>(tensor: ReadRow, shape: [usize; 4], only: Option<&[usize]>) -> Vec<E> {
    let (dim, len) = (shape[3], shape.iter().product::<usize>());
    let mut values = vec![E::from_elem(0.0f64); len];
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let rows = (len / dim).div_ceil(threads);
    thread::scope(|scope| {
        for (n, part) in values.chunks_mut(rows * dim).enumerate() {
            scope.spawn(move || {
                let mut row = vec![0.0; dim];
                for (i, into) in part.chunks_exact_mut(dim).enumerate() {
                    let number = n * rows + i;
                    if only.is_some_and(|only| only.binary_search(&number).is_err()) {
                        continue;
                    }
                    tensor(number, &mut row);
                    for (to, &from) in into.iter_mut().zip(&row) {
                        *to = E::from_elem(from);
                    }
                }
            });
        }
    });
    values
}
