//! An unfused implementation in the element type: its error is the yardstick for the engines.
//!
//! It computes tensor by tensor, as a framework would: products accumulate in f32; the probabilities and the logits'
//! gradients are stored in the element type before the next product, and so are the results. Logits stay f32 (some
//! frameworks round them, too; the yardstick is the more accurate choice). The mean of dL/dp under p is `dout . out` of
//! the rounded output, as in an engine without a residual, or the sum that automatic differentiation computes: see
//! [`Inputs::naive_autograd`].

use crate::attention::Inputs;
use crate::round::round_f32;
use crate::rows::{At, Change, Grads, Pairs, Tensors};
use core::array;
use flash_dma_problem::{OWN_OUTPUT_WEIGHT, ScoreRole, SelectionRule};

/// `out` and `lse` of the naive implementation.
#[derive(Clone, Debug)]
pub struct NaiveForward {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub out: Vec<f64>,
    /// `[batch, q_heads, q_len]`.
    pub lse: Vec<f64>,
}

/// Gradients of the naive implementation.
#[derive(Clone, Debug)]
pub struct NaiveBackward {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: Vec<f64>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: Vec<f64>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: Vec<f64>,
    /// `[batch, kv_heads, k_len]`; given exactly if the problem has scores.
    pub scores: Option<Vec<f64>>,
}

impl Inputs {
    /// [`Inputs::forward`] by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_forward(&self) -> NaiveForward {
        forward(&self.tensors(), &self.selected())
    }

    /// [`Inputs::forward_for`] by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_forward_for(&self, role: ScoreRole) -> NaiveForward {
        forward(&self.tensors(), &self.selected_for(role))
    }

    /// [`Inputs::forward_by`] by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_forward_by(&self, rule: &SelectionRule, role: ScoreRole) -> NaiveForward {
        forward(&self.tensors(), &self.ruled(rule, role))
    }

    /// [`Inputs::backward`] by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_backward(&self, grad_out: &[f64], grad_lse: Option<&[f64]>) -> NaiveBackward {
        self.naive_gradients((grad_out, grad_lse), Mean::OfOutput)
    }

    /// [`Inputs::naive_backward`] with each step of the naive forward pass differentiated automatically: dL/dp is
    /// stored in the element type, and its mean under p is the sum over the pairs of a row. The rounding of `out` does
    /// not enter it, so where one key takes nearly all of a row's weight this is the better yardstick for the scores'
    /// gradients.
    #[must_use]
    pub fn naive_autograd(&self, grad_out: &[f64], grad_lse: Option<&[f64]>) -> NaiveBackward {
        self.naive_gradients((grad_out, grad_lse), Mean::OfPairs)
    }

    /// [`Inputs::rank_gradient`] by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_rank_gradient(
        &self,
        runners_up: usize,
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Vec<f64> {
        let selected = self.selected();
        let asked = (&selected.runners_up(runners_up), Change::Added);
        rank(&self.tensors(), &selected, asked, (grad_out, grad_lse))
    }

    /// [`Inputs::left_out_gradient`] by the same-dtype naive implementation.
    #[must_use]
    pub fn naive_left_out_gradient(
        &self,
        from: &[u32],
        grad_out: &[f64],
        grad_lse: Option<&[f64]>,
    ) -> Vec<f64> {
        let selected = self.selected();
        let asked = (&selected.kept_by_rank(from), Change::LeftOut);
        rank(&self.tensors(), &selected, asked, (grad_out, grad_lse))
    }

    fn naive_gradients(&self, grads: Grads<'_>, mean: Mean) -> NaiveBackward {
        let t = self.tensors();
        let mut scores = self.scores.as_ref().map(|s| vec![0.0f32; s.len()]);
        let sink = |at, j, ds| {
            if let Some(scores) = &mut scores {
                scores[t.k_row(at, j)] += ds;
            }
        };
        let mut grads = backward(&t, &self.selected(), grads, mean, sink);
        grads.scores = scores.map(|s| s.into_iter().map(f64::from).collect());
        grads
    }
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f32 {
    a.iter().zip(b).map(|(&x, &y)| x as f32 * y as f32).sum()
}

/// The [`dot`] of `a` with the row of each key. Eight at once, because the terms of one sum depend on each other.
fn dots<'a>(
    a: &[f64],
    keys: &[(usize, f64)],
    row: impl Fn(usize) -> &'a [f64],
) -> impl Iterator<Item = f32> {
    keys.chunks(8).flat_map(move |keys| {
        let rows: [&[f64]; 8] = array::from_fn(|n| row(keys[n.min(keys.len() - 1)].0));
        let rows = rows.map(|row| &row[..a.len()]);
        // -0.0, like an empty sum of floating-point numbers.
        let mut sums = [-0.0f32; 8];
        for (d, &x) in a.iter().enumerate() {
            for (sum, row) in sums.iter_mut().zip(rows) {
                *sum += x as f32 * row[d] as f32;
            }
        }
        sums.into_iter().take(keys.len())
    })
}

/// `rows::soft_cap` in f32.
pub(crate) fn soft_cap(x: f32, cap: Option<f32>) -> (f32, f32) {
    let Some(cap) = cap else {
        return (x, 1.0);
    };
    let tanh = (x / cap).tanh();
    (cap * tanh, 1.0 - tanh * tanh)
}

/// Probabilities (f32), softcap slopes, and the greatest logit and the logarithm of the sum of exponentials relative to it,
/// of one row; `None` if nothing is attended.
fn softmax(t: &Tensors, at: At, keys: &[(usize, f64)]) -> Option<(Vec<f32>, Vec<f32>, [f32; 2])> {
    let mut slopes = Vec::new();
    let mut p: Vec<f32> = Vec::new();
    let products = dots(t.query(at), keys, |j| t.key(at, j));
    for (&(_, bias), product) in keys.iter().zip(products) {
        let (capped, slope) = soft_cap(t.problem.scale * product, t.problem.softcap);
        p.push(capped + bias as f32);
        slopes.push(slope);
    }
    if p.iter().all(|&a| a == f32::NEG_INFINITY) {
        return None;
    }
    let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    p.iter_mut().for_each(|a| *a = (*a - max).exp());
    let sum: f32 = p.iter().sum();
    p.iter_mut().for_each(|a| *a /= sum);
    Some((p, slopes, [max, sum.ln()]))
}

fn widen(x: Vec<f32>, t: &Tensors) -> Vec<f64> {
    x.into_iter()
        .map(|x| f64::from(round_f32(x, t.problem.element)))
        .collect()
}

pub(crate) fn forward(t: &Tensors, pairs: &impl Pairs) -> NaiveForward {
    let (dim, element) = (t.problem.head_dim, t.problem.element);
    let mut out = vec![0.0f32; t.q.len()];
    let mut lse = vec![f64::NEG_INFINITY; t.q.len() / dim];
    for at in t.queries() {
        let row = t.q_row(at);
        let keys = pairs.biased_row(t.problem, at);
        let Some((p, _, [max, ln_sum])) = softmax(t, at, &keys) else {
            continue;
        };
        lse[row] = f64::from(max + ln_sum);
        let out = &mut out[row * dim..(row + 1) * dim];
        let weights = pairs.weights(t.problem, at);
        for (&(j, _), &p) in keys.iter().zip(&p) {
            let p = round_f32(p * weights(j) as f32, element);
            for (out, &v) in out.iter_mut().zip(t.value(at, j)) {
                *out += p * v as f32;
            }
        }
    }
    let out = widen(out, t);
    NaiveForward { out, lse }
}

/// The source of the mean of dL/dp under p.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mean {
    /// The rounded output.
    OfOutput,
    /// The pairs of a row.
    OfPairs,
}

pub(crate) fn backward(
    t: &Tensors,
    pairs: &impl Pairs,
    (grad_out, grad_lse): Grads,
    mean: Mean,
    mut sink: impl FnMut(At, usize, f32),
) -> NaiveBackward {
    let (dim, element, scale) = (t.problem.head_dim, t.problem.element, t.problem.scale);
    let out = forward(t, pairs).out;
    let [mut dq, mut dk, mut dv] = [t.q, t.k, t.v].map(|x| vec![0.0f32; x.len()]);
    for at in t.queries() {
        let row = t.q_row(at);
        let (q, dout) = (t.query(at), t.row(grad_out, row));
        let keys = pairs.biased_row(t.problem, at);
        let Some((p, slopes, _)) = softmax(t, at, &keys) else {
            continue;
        };
        let weights = pairs.weights(t.problem, at);
        let products = dots(dout, &keys, |j| t.value(at, j));
        let mut dp: Vec<f32> = (products.zip(&keys))
            .map(|(dp, &(j, _))| dp * weights(j) as f32)
            .collect();
        let mean = match mean {
            Mean::OfOutput => dot(dout, t.row(&out, row)),
            Mean::OfPairs => {
                dp.iter_mut().for_each(|dp| *dp = round_f32(*dp, element));
                p.iter().zip(&dp).map(|(p, dp)| p * dp).sum()
            }
        };
        let mean = mean - grad_lse.map_or(0.0, |g| g[row] as f32);
        let dq = &mut dq[row * dim..(row + 1) * dim];
        for ((n, &(j, _)), dp) in keys.iter().enumerate().zip(dp) {
            let key = t.k_row(at, j);
            let ds = p[n] * (dp - mean);
            sink(at, j, ds);
            let p = round_f32(p[n] * weights(j) as f32, element);
            let ds = round_f32(ds * slopes[n], element);
            let add = |to: &mut [f32], factor: f32, weight: f32, from: &[f64]| {
                for (to, &x) in to.iter_mut().zip(from) {
                    *to += factor * (weight * x as f32);
                }
            };
            add(dq, scale, ds, t.key(at, j));
            add(&mut dk[key * dim..(key + 1) * dim], scale, ds, q);
            add(&mut dv[key * dim..(key + 1) * dim], 1.0, p, dout);
        }
    }
    let [q, k, v] = [dq, dk, dv].map(|x| widen(x, t));
    let scores = None;
    NaiveBackward { q, k, v, scores }
}

/// `rows::rank` with the rounded output and in f32; no intermediate result is stored.
pub(crate) fn rank(
    t: &Tensors,
    pairs: &impl Pairs,
    (asked, change): (&impl Pairs, Change),
    (grad_out, grad_lse): Grads,
) -> Vec<f64> {
    let out = forward(t, pairs).out;
    let mut rank = vec![0.0f32; t.problem.scores_shape().iter().product()];
    for at in t.queries() {
        let row = t.q_row(at);
        let dout = t.row(grad_out, row);
        let keys = pairs.biased_row(t.problem, at);
        let outside = asked.biased_row(t.problem, at);
        let Some((_, _, [max, ln_sum])) = softmax(t, at, &keys) else {
            continue;
        };
        let mean = dot(dout, t.row(&out, row));
        let products = dots(t.query(at), &outside, |j| t.key(at, j));
        let dp = dots(dout, &outside, |j| t.value(at, j));
        for ((&(j, bias), product), dp) in outside.iter().zip(products).zip(dp) {
            let (capped, _) = soft_cap(t.problem.scale * product, t.problem.softcap);
            let x = (capped + bias as f32 - max) - ln_sum;
            let (weight, of_lse) = match change {
                Change::Added => {
                    let positive = if x < 0.0 { 0.0 } else { x };
                    (
                        1.0 / (1.0 + (-x).exp()),
                        positive + (-x.abs()).exp().ln_1p(),
                    )
                }
                Change::LeftOut => {
                    let (p, all) = (x.exp(), 1.0 + OWN_OUTPUT_WEIGHT);
                    (p / (all - p), -(-p / all).ln_1p())
                }
            };
            let mut gradient = weight * (dp - mean);
            if let Some(grad_lse) = grad_lse {
                gradient += grad_lse[row] as f32 * of_lse;
            }
            rank[t.k_row(at, j)] += gradient;
        }
    }
    rank.into_iter().map(f64::from).collect()
}
