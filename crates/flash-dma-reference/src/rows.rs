//! Attention over explicit pairs: the only implementation of a row's softmax and its gradients.

use crate::compare::{CUT_OFF, Exact};
use flash_dma_problem::{ElementType, OWN_OUTPUT_WEIGHT, Problem};
use std::ops::Range;

/// The results of the forward pass.
#[derive(Clone, Debug)]
pub struct Forward {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub out: Exact,
    /// `[batch, q_heads, q_len]`, natural logarithm.
    pub lse: Exact,
}

/// A query: its sequence, its query head and its index.
pub(crate) type At = [usize; 3];

/// Keys that a query is paired with, and their biases.
pub(crate) type Keys = Vec<(usize, f64)>;

/// The keys that each query attends to.
pub(crate) trait Pairs {
    fn row(&self, at: At) -> Keys;

    /// The ALiBi terms of that query's logits, for each key.
    fn alibi(&self, p: &Problem, [_, h, i]: At) -> impl Fn(usize) -> f64 {
        alibi(p, h, i)
    }

    /// [`row`](Self::row) with ALiBi in the biases.
    fn biased_row(&self, p: &Problem, at: At) -> Keys {
        let alibi = self.alibi(p, at);
        let keys = self.row(at).into_iter();
        keys.map(|(j, bias)| (j, bias + alibi(j))).collect()
    }

    /// The factors by which dropout multiplies the probabilities of that query, for each key.
    fn weights(&self, p: &Problem, [b, h, i]: At) -> impl Fn(usize) -> f64 {
        let weights = p.dropout_weights(b * p.q_heads + h, i);
        move |j| f64::from(weights(j))
    }
}

impl<F: Fn(At) -> Keys> Pairs for F {
    fn row(&self, at: At) -> Keys {
        self(at)
    }
}

/// The ALiBi terms of the logits of query `i` of head `h`, for each key; 0 without.
pub(crate) fn alibi(p: &Problem, h: usize, i: usize) -> impl Fn(usize) -> f64 + use<> {
    let (p, slope) = (*p, p.slope(h).map_or(0.0, f64::from));
    move |j| -slope * p.distance(i, j) as f64
}

/// The kv head, counted over the batch, that query head `h` reads.
pub(crate) fn kv_head(p: &Problem, b: usize, h: usize) -> usize {
    b * p.kv_heads + h / p.group()
}

/// The keys of that head in a tensor of keys.
pub(crate) fn kv_keys(p: &Problem, b: usize, h: usize) -> Range<usize> {
    let head = kv_head(p, b, h);
    head * p.k_len..(head + 1) * p.k_len
}

/// The keys up to the position of query `i`.
pub(crate) fn visible(p: &Problem, i: usize) -> Range<usize> {
    0..(p.position(i) + 1).clamp(0, p.k_len as i64) as usize
}

/// The gradients of `out` and of the LSE (`None` is zero).
pub(crate) type Grads<'a> = (&'a [f64], Option<&'a [f64]>);

/// Contiguous `q`, `k`, `v`.
#[derive(Clone, Copy)]
pub(crate) struct Tensors<'a> {
    pub problem: &'a Problem,
    pub q: &'a [f64],
    pub k: &'a [f64],
    pub v: &'a [f64],
    pub logits: Logits,
}

/// The rounding of logits before the softmax.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logits {
    /// None, so that the error of f32 arithmetic grows with the logit's terms.
    Exact,
    /// The rounding of f32, for the capped product and for its sum with the bias.
    Rounded,
}

/// Differences of logits at which an exponential is 0 in f32.
const VANISHES: f64 = 104.0;

impl<'a> Tensors<'a> {
    /// Tensors in the shapes of a problem, with exact logits.
    pub fn new(problem: &'a Problem, [q, k, v]: [&'a [f64]; 3]) -> Self {
        let logits = Logits::Exact;
        assert_eq!(q.len(), problem.q_shape().iter().product::<usize>(), "q");
        assert_eq!(k.len(), problem.kv_shape().iter().product::<usize>(), "k");
        assert_eq!(v.len(), k.len(), "v");
        Self {
            problem,
            q,
            k,
            v,
            logits,
        }
    }

    /// Offset of a query's row in units of rows, so the offset in the LSE as well.
    pub fn q_row(&self, [b, h, i]: At) -> usize {
        (b * self.problem.q_heads + h) * self.problem.q_len + i
    }

    /// Offset of row `j` of the kv head that a query reads, in units of rows.
    pub fn k_row(&self, [b, h, _]: At, j: usize) -> usize {
        kv_head(self.problem, b, h) * self.problem.k_len + j
    }

    /// A query.
    pub fn query(&self, at: At) -> &'a [f64] {
        self.row(self.q, self.q_row(at))
    }

    /// Key `j` of a query.
    pub fn key(&self, at: At, j: usize) -> &'a [f64] {
        self.row(self.k, self.k_row(at, j))
    }

    /// The value of key `j` of a query.
    pub fn value(&self, at: At, j: usize) -> &'a [f64] {
        self.row(self.v, self.k_row(at, j))
    }

    /// Row `row` of a tensor with rows of `head_dim`.
    pub fn row(&self, tensor: &'a [f64], row: usize) -> &'a [f64] {
        let d = self.problem.head_dim;
        &tensor[row * d..(row + 1) * d]
    }

    /// Every query.
    pub fn queries(&self) -> impl Iterator<Item = At> + use<> {
        let p = *self.problem;
        (0..p.batch).flat_map(move |b| {
            (0..p.q_heads).flat_map(move |h| (0..p.q_len).map(move |i| [b, h, i]))
        })
    }
}

/// The dot product of two rows, and that of their absolute values. Eight sums at once: the order does not matter at
/// this precision, and a processor adds them in parallel.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> (f64, f64) {
    let mut sums = [[0.0; 8]; 2];
    // Head dimensions are multiples of 8.
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for n in 0..8 {
            sums[0][n] += a[n] * b[n];
            sums[1][n] += (a[n] * b[n]).abs();
        }
    }
    let [dot, abs] = sums.map(|sums| sums.iter().sum());
    (dot, abs)
}

/// The capped product and the slope of the cap there.
pub(crate) fn soft_cap(x: f64, cap: Option<f32>) -> (f64, f64) {
    let Some(cap) = cap.map(f64::from) else {
        return (x, 1.0);
    };
    let tanh = (x / cap).tanh();
    (cap * tanh, 1.0 - tanh * tanh)
}

struct Softmax {
    /// Probability and softcap derivative of each attended key, in the order of the pairs.
    p: Vec<f64>,
    cap_slope: Vec<f64>,
    /// The greatest logit, and the logarithm of the sum of exponentials relative to it: the LSE in two parts.
    max: f64,
    ln_sum: f64,
    /// 1 + the greatest sum of absolute terms of a logit, the terms of a product counted as often as [`CUT_OFF`] says:
    /// f32 arithmetic gets a probability wrong by about this many epsilons. Infinite terms do not count, because their
    /// results are not rounded (a logit of −∞ has probability exactly 0, a capped one is the cap, and +∞ makes the row
    /// NaN).
    spread: f64,
}

/// The logit of a query and a key with a bias, the slope of the cap there, and the [`spread`](Softmax::spread) of the
/// logit alone.
fn logit(t: &Tensors, q: &[f64], k: &[f64], bias: f64) -> (f64, f64, f64) {
    let scale = f64::from(t.problem.scale);
    let parts = match t.problem.element {
        ElementType::F32 => 1.0,
        ElementType::F16 | ElementType::Bf16 => (q.len() as f64 / CUT_OFF as f64).max(1.0),
    };
    let (product, product_abs) = dot(q, k);
    let (capped, slope) = soft_cap(scale * product, t.problem.softcap);
    match t.logits {
        Logits::Exact => {
            let size = 1.0 + parts * scale.abs() * product_abs + bias.abs();
            (capped + bias, slope, size)
        }
        Logits::Rounded => (f64::from(capped as f32 + bias as f32), slope, 1.0),
    }
}

/// The softmax of a row; `None` if nothing is attended to or every logit is −∞.
fn softmax(t: &Tensors, at: At, keys: &[(usize, f64)]) -> Option<Softmax> {
    let mut spread = 1.0f64;
    let (mut logits, mut cap_slope) = (Vec::new(), Vec::new());
    for &(j, bias) in keys {
        let (logit, slope, size) = logit(t, t.query(at), t.key(at, j), bias);
        if size.is_finite() {
            spread = spread.max(size);
        }
        logits.push(logit);
        cap_slope.push(slope);
    }
    if logits.iter().all(|&a| a == f64::NEG_INFINITY) {
        return None;
    }
    // `f64::max` ignores NaN; the sum brings it back. A logit of +∞ makes ∞ − ∞, so NaN.
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|a| (a - max).exp()).sum();
    let p = logits.iter().map(|a| (a - max).exp() / sum).collect();
    if t.logits == Logits::Rounded {
        let differences = logits.iter().map(|a| max - a);
        spread += differences.filter(|&a| a < VANISHES).fold(0.0, f64::max);
    }
    Some(Softmax {
        p,
        cap_slope,
        max,
        ln_sum: sum.ln(),
        spread,
    })
}

/// `out` and `lse` with their magnitudes.
pub(crate) fn forward(t: &Tensors, pairs: &impl Pairs) -> Forward {
    let p = t.problem;
    let mut out = Exact::zeros(t.q.len());
    let mut lse = Exact::zeros(p.batch * p.q_heads * p.q_len);
    for at in t.queries() {
        let row = t.q_row(at);
        let keys = pairs.biased_row(p, at);
        let Some(s) = softmax(t, at, &keys) else {
            lse.values[row] = f64::NEG_INFINITY;
            continue;
        };
        lse.add(row, s.max + s.ln_sum, s.spread + (keys.len() as f64).ln());
        let weights = pairs.weights(p, at);
        for (&(j, _), &prob) in keys.iter().zip(&s.p) {
            let prob = prob * weights(j);
            out.add_row(row * p.head_dim, prob, s.spread * prob, t.value(at, j));
        }
    }
    Forward { out, lse }
}

/// The probabilities of the queries `chosen`, `[batch, q_heads, chosen, k_len]`, 0 where nothing is attended to. They
/// are computed from a logit and an LSE, which is a sum over logits, so the magnitude includes both.
pub(crate) fn probabilities(t: &Tensors, pairs: &impl Pairs, chosen: &[usize]) -> Exact {
    let p = t.problem;
    let mut probabilities = Exact::zeros(p.batch * p.q_heads * chosen.len() * p.k_len);
    let heads = (0..p.batch).flat_map(|b| (0..p.q_heads).map(move |h| (b, h)));
    let rows = heads.flat_map(|(b, h)| chosen.iter().map(move |&i| [b, h, i]));
    for (row, at) in rows.enumerate() {
        let keys = pairs.biased_row(p, at);
        let Some(s) = softmax(t, at, &keys) else {
            continue;
        };
        let size = 2.0 * s.spread + (keys.len() as f64).ln();
        for (&(j, _), &prob) in keys.iter().zip(&s.p) {
            probabilities.add(row * p.k_len + j, prob, size * prob);
        }
    }
    probabilities
}

/// Gradients of `q`, `k`, `v`; `sink` gets the gradient of each pair's bias and its magnitude, as
/// `(query, key, gradient, magnitude)`.
pub(crate) fn backward(
    t: &Tensors,
    pairs: &impl Pairs,
    (grad_out, grad_lse): Grads,
    mut sink: impl FnMut(At, usize, f64, f64),
) -> [Exact; 3] {
    let (dim, scale) = (t.problem.head_dim, f64::from(t.problem.scale));
    let [mut dq, mut dk, mut dv] = [t.q, t.k, t.v].map(|x| Exact::zeros(x.len()));
    for at in t.queries() {
        let row = t.q_row(at);
        let (q, dout) = (t.query(at), t.row(grad_out, row));
        let keys = pairs.biased_row(t.problem, at);
        let Some(s) = softmax(t, at, &keys) else {
            continue;
        };
        // dL/dp of each pair, and their mean under p, which is dout . out.
        let weights = pairs.weights(t.problem, at);
        let dp = |j: usize| {
            let (dp, size) = dot(dout, t.value(at, j));
            (dp * weights(j), size * weights(j))
        };
        let dp: Vec<(f64, f64)> = keys.iter().map(|&(j, _)| dp(j)).collect();
        let dlse = grad_lse.map_or(0.0, |g| g[row]);
        let mean: f64 = s.p.iter().zip(&dp).map(|(p, dp)| p * dp.0).sum();
        let mean_abs: f64 = s.p.iter().zip(&dp).map(|(p, dp)| p * dp.1).sum();
        for (n, &(j, _)) in keys.iter().enumerate() {
            let (prob, key) = (s.p[n], t.k_row(at, j));
            let ds = prob * (dp[n].0 - mean + dlse);
            let ds_size = s.spread * prob * (dp[n].1 + mean_abs + dlse.abs());
            sink(at, j, ds, ds_size);
            // Where the cap saturates, its slope is 1 minus nearly 1, so the error of the slope is absolute.
            let (raw, raw_size) = (scale * ds * s.cap_slope[n], scale.abs() * ds_size);
            dq.add_row(row * dim, raw, raw_size, t.key(at, j));
            dk.add_row(key * dim, raw, raw_size, q);
            let prob = prob * weights(j);
            dv.add_row(key * dim, prob, s.spread * prob, dout);
        }
    }
    [dq, dk, dv]
}

/// The change of a row's pairs that trains a key's rank.
#[derive(Clone, Copy)]
pub(crate) enum Change {
    /// A runner-up is also attended to.
    Added,
    /// A kept key is left out.
    LeftOut,
}

/// The contribution of a key, whose logit is `x` above the LSE, to a row.
struct Part {
    /// The factor of `v - out`.
    weight: f64,
    /// The part of the LSE.
    lse: f64,
    /// The derivative of `weight` by `x`.
    slope: f64,
}

impl Change {
    fn part(self, x: f64) -> Part {
        match self {
            Self::Added => {
                let e = (-x.abs()).exp();
                let weight = if x >= 0.0 { 1.0 } else { e } / (1.0 + e);
                // `f64::max` would lose a NaN.
                let positive = if x < 0.0 { 0.0 } else { x };
                Part {
                    weight,
                    lse: positive + e.ln_1p(),
                    slope: weight,
                }
            }
            Self::LeftOut => {
                let (p, all) = (x.exp(), 1.0 + f64::from(OWN_OUTPUT_WEIGHT));
                let weight = p / (all - p);
                Part {
                    weight,
                    lse: -(-p / all).ln_1p(),
                    slope: weight * all / (all - p),
                }
            }
        }
    }
}

/// The gradient of the rank, `[batch, kv_heads, k_len]`: for each key that `asked` pairs with a row, the first-order
/// change of the loss that adding the key would make, if `pairs` does not have the pair, or that the key makes.
pub(crate) fn rank(
    t: &Tensors,
    pairs: &impl Pairs,
    (asked, change): (&impl Pairs, Change),
    (grad_out, grad_lse): Grads,
) -> Exact {
    let mut rank = Exact::zeros(t.problem.scores_shape().iter().product());
    for at in t.queries() {
        let row = t.q_row(at);
        let dout = t.row(grad_out, row);
        let keys = pairs.biased_row(t.problem, at);
        let outside = asked.biased_row(t.problem, at);
        // A row that attends to nothing gives none.
        let Some(s) = softmax(t, at, &keys) else {
            continue;
        };
        let dp = |j: usize| dot(dout, t.value(at, j));
        let weights = pairs.weights(t.problem, at);
        let (mut mean, mut mean_abs) = (0.0, 0.0);
        for (p, &(j, _)) in s.p.iter().zip(&keys) {
            // The output has dropout; the pairs of `asked` have none.
            let [dp, dp_abs] = <[f64; 2]>::from(dp(j)).map(|dp| dp * weights(j));
            mean += p * dp;
            mean_abs += p * dp_abs;
        }
        let dlse = grad_lse.map(|g| g[row]);
        for &(j, bias) in &outside {
            let (logit, _, size) = logit(t, t.query(at), t.key(at, j), bias);
            let above = (logit - s.max) - s.ln_sum;
            let size = match t.logits {
                Logits::Exact => size,
                Logits::Rounded => size + above.abs().min(VANISHES),
            };
            let Part { weight, lse, slope } = change.part(above);
            let (dp, dp_abs) = dp(j);
            let mut gradient = weight * (dp - mean);
            let size = if size.is_finite() { size } else { 0.0 };
            let spread = s.spread.max(size);
            let mut magnitude = spread * slope * (dp_abs + mean_abs);
            if let Some(dlse) = dlse {
                gradient += dlse * lse;
                // The derivative of the LSE's part is the weight.
                magnitude += dlse.abs() * (lse + spread * weight);
            }
            rank.add(t.k_row(at, j), gradient, magnitude);
        }
    }
    rank
}
