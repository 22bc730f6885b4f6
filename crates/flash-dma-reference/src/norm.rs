//! RMS norm of rows and rotary encoding of heads, with their gradients.

use crate::compare::Exact;
use crate::generate::normal;
use crate::rng::Rng;
use crate::round::{round, round_f32};
use flash_dma_problem::{ElementType, NormProblem};

/// The inputs of a [`NormProblem`]: contiguous, in its shapes.
#[derive(Clone, Debug)]
pub struct Norm {
    /// Sizes and options.
    pub problem: NormProblem,
    /// `[batch, len, heads, width]`.
    pub x: Vec<f64>,
    /// `[width]`; given exactly if the problem has a norm.
    pub gamma: Option<Vec<f64>>,
    /// `[positions, width / 2, 2]`, cosine and sine of each pair of features; given exactly if there is rotary encoding.
    pub table: Option<Vec<f64>>,
}

/// Gradients of the inputs.
#[derive(Clone, Debug)]
pub struct NormBackward {
    /// `[batch, len, heads, width]`.
    pub x: Exact,
    /// `[width]`; given exactly if there is a norm.
    pub gamma: Option<Exact>,
}

/// Gradients of the inputs by the naive implementation.
#[derive(Clone, Debug)]
pub struct NaiveNormBackward {
    /// `[batch, len, heads, width]`.
    pub x: Vec<f64>,
    /// `[width]`; given exactly if there is a norm.
    pub gamma: Option<Vec<f64>>,
}

/// Cosine and sine of every pair of features at the positions `0..positions`, rounded to f32: the table of rotary
/// frequencies `10000^(-2 i / width)`.
#[must_use]
pub fn angles(positions: usize, width: usize) -> Vec<f64> {
    let mut table = Vec::with_capacity(positions * width);
    for position in 0..positions {
        for pair in 0..width / 2 {
            let frequency = 1e4f64.powf(-2.0 * pair as f64 / width as f64);
            let angle = position as f64 * frequency;
            table.extend([angle.cos(), angle.sin()].map(|x| round(x, ElementType::F32)));
        }
    }
    table
}

#[derive(Clone, Copy)]
struct Row {
    /// The start of the row in `x`.
    from: usize,
    /// The start of the row in the output.
    to: usize,
    /// The start of the angles of its position.
    angles: usize,
}

impl Norm {
    /// Random inputs of the problem's element types: normal `x`, weights about 1, the angles of [`angles`].
    #[must_use]
    pub fn random(problem: NormProblem, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let element = problem.element;
        let gamma = problem.epsilon.map(|_| {
            let spread = normal(problem.width, 0.3, problem.gamma, &mut rng);
            (spread.iter())
                .map(|x| round(1.0 + x, problem.gamma))
                .collect()
        });
        Self {
            problem,
            x: normal(problem.x_shape().iter().product(), 1.0, element, &mut rng),
            gamma,
            table: (problem.rotary).map(|rotary| angles(rotary.positions, problem.width)),
        }
    }

    fn rows(&self) -> impl Iterator<Item = Row> + use<> {
        let p = self.problem;
        let start = p.rotary.map_or(0, |rotary| rotary.start);
        (0..p.batch).flat_map(move |b| {
            (0..p.len).flat_map(move |n| {
                (0..p.heads).map(move |h| Row {
                    from: ((b * p.len + n) * p.heads + h) * p.width,
                    to: ((b * p.heads + h) * p.len + n) * p.width,
                    angles: (start + n) * p.width,
                })
            })
        })
    }

    /// The reciprocal root mean square of a row; 1 without a norm.
    fn reciprocal(&self, row: Row) -> f64 {
        let Some(epsilon) = self.problem.epsilon else {
            return 1.0;
        };
        let x = &self.x[row.from..row.from + self.problem.width];
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        1.0 / (mean + f64::from(epsilon)).sqrt()
    }

    fn weight(&self, feature: usize) -> f64 {
        self.gamma.as_ref().map_or(1.0, |gamma| gamma[feature])
    }

    /// Cosine and sine of a pair of features of a row.
    fn angle(&self, row: Row, pair: usize) -> Option<(f64, f64)> {
        let table = self.table.as_ref()?;
        let at = row.angles + 2 * pair;
        Some((table[at], table[at + 1]))
    }

    /// The terms of element `feature` of a row that is rotated, or rotated back: its own and its partner's.
    fn rotated(&self, row: Row, feature: usize, values: &[f64], back: bool) -> [f64; 2] {
        let Some((cos, sin)) = self.angle(row, feature / 2) else {
            return [values[feature], 0.0];
        };
        let negative = feature.is_multiple_of(2) != back;
        let sin = if negative { -sin } else { sin };
        [values[feature] * cos, values[feature ^ 1] * sin]
    }

    /// The output, `[batch, heads, len, width]`.
    #[must_use]
    pub fn forward(&self) -> Exact {
        let width = self.problem.width;
        let mut out = Exact::zeros(self.x.len());
        for row in self.rows() {
            let r = self.reciprocal(row);
            let normal: Vec<f64> = (0..width)
                .map(|j| self.x[row.from + j] * r * self.weight(j))
                .collect();
            for j in 0..width {
                let [own, partner] = self.rotated(row, j, &normal, false);
                out.add(row.to + j, own + partner, own.abs() + partner.abs());
            }
        }
        out
    }

    /// The gradients, from that of the output, `[batch, heads, len, width]`.
    #[must_use]
    pub fn backward(&self, grad_out: &[f64]) -> NormBackward {
        let width = self.problem.width;
        let mut x_grad = Exact::zeros(self.x.len());
        let mut gamma_grad = self.gamma.as_ref().map(|_| Exact::zeros(width));
        for row in self.rows() {
            let r = self.reciprocal(row);
            let x = &self.x[row.from..row.from + width];
            let grad = &grad_out[row.to..row.to + width];
            let rotated = |j| {
                let [own, partner] = self.rotated(row, j, grad, true);
                (own + partner, own.abs() + partner.abs())
            };
            let (mut dot, mut dot_size) = (0.0, 0.0);
            for (j, x) in x.iter().enumerate() {
                let (g, size) = rotated(j);
                if let Some(gamma_grad) = &mut gamma_grad {
                    gamma_grad.add(j, g * x * r, size * (x * r).abs());
                }
                dot += g * self.weight(j) * x;
                dot_size += size * (self.weight(j) * x).abs();
            }
            for (j, x) in x.iter().enumerate() {
                let (g, size) = rotated(j);
                let direct = r * self.weight(j);
                x_grad.add(row.from + j, g * direct, size * direct.abs());
                if gamma_grad.is_some() {
                    // The derivative of the reciprocal.
                    let through = -r.powi(3) * x / width as f64;
                    x_grad.add(row.from + j, through * dot, through.abs() * dot_size);
                }
            }
        }
        NormBackward {
            x: x_grad,
            gamma: gamma_grad,
        }
    }

    /// [`forward`](Self::forward) by a same-dtype naive implementation: tensor by tensor, each rounded to the element
    /// type, except the mean square and the rotation, which are f32.
    #[must_use]
    pub fn naive_forward(&self) -> Vec<f64> {
        let width = self.problem.width;
        let mut out = vec![0.0; self.x.len()];
        for row in self.rows() {
            let (_, normal) = self.naive_row(row);
            let rotated = self.naive_rotated(row, &normal, false);
            for (out, value) in out[row.to..row.to + width].iter_mut().zip(rotated) {
                *out = f64::from(value);
            }
        }
        out
    }

    /// [`backward`](Self::backward) of the naive implementation by automatic differentiation; sums over rows and
    /// features in f32.
    #[must_use]
    pub fn naive_backward(&self, grad_out: &[f64]) -> NaiveNormBackward {
        let (width, element) = (self.problem.width, self.problem.element);
        let stored = |x: f32| round_f32(x, element);
        let mut x_grad = vec![0.0; self.x.len()];
        let mut gamma_grad = self.gamma.as_ref().map(|_| vec![0.0f32; width]);
        for row in self.rows() {
            let grad: Vec<f32> = (0..width).map(|j| grad_out[row.to + j] as f32).collect();
            let grad = self.naive_rotated(row, &grad, true);
            let Some(gamma_grad) = &mut gamma_grad else {
                for j in 0..width {
                    x_grad[row.from + j] = f64::from(grad[j]);
                }
                continue;
            };
            let x = |j: usize| self.x[row.from + j] as f32;
            let (rms, _) = self.naive_row(row);
            let mut of_rms = 0.0f32;
            let mut direct = vec![0.0f32; width];
            for j in 0..width {
                gamma_grad[j] += stored(grad[j] * stored(x(j) / rms));
                let weighted = stored(grad[j] * self.weight(j) as f32);
                direct[j] = stored(weighted / rms);
                of_rms -= stored(weighted * x(j) / (rms * rms));
            }
            for j in 0..width {
                let through = stored(of_rms * x(j) / (rms * width as f32));
                x_grad[row.from + j] = f64::from(stored(direct[j] + through));
            }
        }
        NaiveNormBackward {
            x: x_grad,
            gamma: gamma_grad.map(|sums| {
                let stored = |&sum: &f32| round(f64::from(sum), self.problem.gamma);
                sums.iter().map(stored).collect()
            }),
        }
    }

    /// The root mean square of a row (1 without a norm), and the row weighted.
    fn naive_row(&self, row: Row) -> (f32, Vec<f32>) {
        let (width, element) = (self.problem.width, self.problem.element);
        let x = &self.x[row.from..row.from + width];
        let stored = |x: f32| round_f32(x, element);
        let Some(epsilon) = self.problem.epsilon else {
            return (1.0, x.iter().map(|&x| x as f32).collect());
        };
        let squares: f32 = x.iter().map(|&x| (x * x) as f32).sum();
        let rms = stored((squares / width as f32 + epsilon).sqrt());
        let weighted =
            |(j, &x): (usize, &f64)| stored(stored(x as f32 / rms) * self.weight(j) as f32);
        (rms, x.iter().enumerate().map(weighted).collect())
    }

    /// All elements of a row that is rotated, or rotated back.
    fn naive_rotated(&self, row: Row, values: &[f32], back: bool) -> Vec<f32> {
        let wide: Vec<f64> = values.iter().map(|&x| x.into()).collect();
        let rotated = |j| {
            let [own, partner] = self.rotated(row, j, &wide, back);
            round_f32(own as f32 + partner as f32, self.problem.element)
        };
        (0..wide.len()).map(rotated).collect()
    }
}
