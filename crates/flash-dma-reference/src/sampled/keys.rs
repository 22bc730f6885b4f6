//! The gradients of chosen keys from every query that attends to them, given the results saved by the forward pass.

use super::{ReadRow, Sampled, Source, parallel};
use crate::compare::Exact;
use crate::naive;
use crate::round::round_f32;
use crate::rows;
use flash_dma_problem::{Interval, Problem};

/// The most pieces into which the queries are cut, and the fewest queries per piece. They determine the order of a sum,
/// so they do not depend on the machine.
const PIECES: usize = 256;
const PIECE: usize = 256;

/// Gradients of some keys of one kv head.
#[derive(Clone, Debug)]
pub struct SampledKeys {
    /// `dk` of the keys.
    pub k: Sampled,
    /// `dv` of the keys.
    pub v: Sampled,
    /// `dscores` of the keys, one element wide; given exactly if the problem has scores.
    pub scores: Option<Sampled>,
}

impl SampledKeys {
    /// Adds the keys of a later kv head: a comparison by the naive error needs many keys.
    ///
    /// # Panics
    ///
    /// If the head is not a later one.
    pub fn append(&mut self, later: Self) {
        self.k.append(later.k);
        self.v.append(later.v);
        if let (Some(scores), Some(later)) = (&mut self.scores, later.scores) {
            scores.append(later);
        }
    }
}

impl Source<'_> {
    /// The gradients of `keys` (ascending indices in kv head `head`, which counts over the batch) of a backward pass
    /// that is given `out` (rows of `[batch, q_heads, q_len, head_dim]`) and `lse` (`[batch, q_heads, q_len]`, read as
    /// rows of one element), which may be an engine's: these are compared elsewhere. A pair's probability is
    /// `exp(logit − lse)`, and the mean of dL/dp under it is `grad_out · out`.
    ///
    /// # Panics
    ///
    /// If there is no such head or key, or `scores` or `grad_lse` do not have the problem's shape.
    #[must_use]
    pub fn keys(&self, head: usize, keys: &[usize], out: ReadRow, lse: ReadRow) -> SampledKeys {
        self.check();
        let p = &self.problem;
        let intervals = self.intervals(head);
        let keys: Vec<Key> = (keys.iter())
            .map(|&j| Key::new(self, head, j, intervals[j]))
            .collect();
        let queries = p.group() * p.q_len;
        let piece = queries.div_ceil(PIECES).max(PIECE);
        let sums = parallel::map(queries.div_ceil(piece), |n| {
            let mut sums = Sums::zeros(keys.len(), p.head_dim);
            for query in n * piece..queries.min((n + 1) * piece) {
                sums.add_query(self, &keys, head * queries + query, out, lse);
            }
            sums
        });
        let mut total = Sums::zeros(keys.len(), p.head_dim);
        sums.iter().for_each(|sums| total.add(sums));
        total.finish(p, keys.iter().map(|key| key.row).collect())
    }
}

struct Key {
    /// Row number in `k`.
    row: usize,
    interval: Interval,
    k: Vec<f64>,
    v: Vec<f64>,
    score: f64,
}

impl Key {
    fn new(source: &Source, head: usize, j: usize, interval: Interval) -> Self {
        let row = head * source.problem.k_len + j;
        Self {
            row,
            interval,
            k: source.read(source.k, &[row]),
            v: source.read(source.v, &[row]),
            score: source.scores.map_or(0.0, |scores| f64::from(scores[row])),
        }
    }
}

/// The gradients of k, v and the scores over some queries: exact, and of the naive implementation in f32.
struct Sums {
    exact: [Exact; 3],
    naive: [Vec<f32>; 3],
}

struct Pair<'a> {
    key: &'a Key,
    /// The score of the key, with ALiBi.
    bias: f64,
    /// The factor of dropout.
    weight: f32,
}

struct Query {
    q: Vec<f64>,
    grad_out: Vec<f64>,
    lse: f64,
    grad_lse: f64,
    /// `grad_out · out`, the sum of the absolute values of its terms, and the naive form of it.
    delta: (f64, f64),
    naive_delta: f32,
}

impl Sums {
    fn zeros(keys: usize, dim: usize) -> Self {
        let len = [keys * dim, keys * dim, keys];
        Self {
            exact: len.map(Exact::zeros),
            naive: len.map(|len| vec![0.0; len]),
        }
    }

    fn add_query(&mut self, source: &Source, keys: &[Key], row: usize, out: ReadRow, lse: ReadRow) {
        let p = &source.problem;
        let position = p.position(row % p.q_len);
        let mut attended = (keys.iter().enumerate())
            .filter(|(_, key)| key.interval.contains(position))
            .peekable();
        // A row with an LSE of −∞ has only logits of −∞ and contributes nothing.
        let mut row_lse = [0.0];
        lse(row, &mut row_lse);
        let [lse] = row_lse;
        if attended.peek().is_none() || lse == f64::NEG_INFINITY {
            return;
        }
        let read = |tensor| source.read(tensor, &[row]);
        let (grad_out, out) = (read(source.grad_out), read(out));
        let query = Query {
            q: read(source.q),
            lse,
            grad_lse: source.grad_lse.map_or(0.0, |g| f64::from(g[row])),
            delta: rows::dot(&grad_out, &out),
            naive_delta: naive::dot(&grad_out, &out),
            grad_out,
        };
        let weights = p.dropout_weights(row / p.q_len, row % p.q_len);
        let alibi = rows::alibi(p, row / p.q_len % p.q_heads, row % p.q_len);
        for (n, key) in attended {
            let j = key.row % p.k_len;
            let pair = Pair {
                key,
                bias: key.score + alibi(j),
                weight: weights(j),
            };
            self.add_pair(p, n, &pair, &query);
            self.add_naive_pair(p, n, &pair, &query);
        }
    }

    fn add_pair(&mut self, p: &Problem, n: usize, pair: &Pair, query: &Query) {
        let &Pair { key, bias, weight } = pair;
        let (dim, scale) = (p.head_dim, f64::from(p.scale));
        let (product, product_abs) = rows::dot(&query.q, &key.k);
        let x = scale * product;
        let (capped, slope) = rows::soft_cap(x, p.softcap);
        let prob = (capped + bias - query.lse).exp();
        // The LSE is given, so a probability is only as wrong as its own logit and the difference.
        let size = 1.0 + scale.abs() * product_abs + bias.abs() + query.lse.abs();
        let size = if size.is_finite() { size } else { 1.0 };
        let dp = <[f64; 2]>::from(rows::dot(&query.grad_out, &key.v));
        let [dp, dp_abs] = dp.map(|dp| dp * f64::from(weight));
        let ds = prob * (dp - query.delta.0 + query.grad_lse);
        let ds_size = size * prob * (dp_abs + query.delta.1 + query.grad_lse.abs());
        let [dk, dv, scores] = &mut self.exact;
        scores.add(n, ds, ds_size);
        let (raw, raw_size) = (scale * ds * slope, scale.abs() * ds_size);
        dk.add_row(n * dim, raw, raw_size, &query.q);
        let prob = prob * f64::from(weight);
        dv.add_row(n * dim, prob, size * prob, &query.grad_out);
    }

    /// Adds a pair as `naive::backward` does.
    fn add_naive_pair(&mut self, p: &Problem, n: usize, pair: &Pair, query: &Query) {
        let &Pair { key, bias, weight } = pair;
        let (dim, element, scale) = (p.head_dim, p.element, p.scale);
        let x = scale * naive::dot(&query.q, &key.k);
        let (capped, slope) = naive::soft_cap(x, p.softcap);
        let prob = (capped + bias as f32 - query.lse as f32).exp();
        let mean = query.naive_delta - query.grad_lse as f32;
        let dp = naive::dot(&query.grad_out, &key.v) * weight;
        let ds = prob * (dp - mean);
        let [dk, dv, scores] = &mut self.naive;
        scores[n] += ds;
        let prob = round_f32(prob * weight, element);
        let ds = round_f32(ds * slope, element);
        for d in 0..dim {
            dk[n * dim + d] += scale * (ds * query.q[d] as f32);
            dv[n * dim + d] += prob * query.grad_out[d] as f32;
        }
    }

    fn add(&mut self, other: &Self) {
        for (sum, x) in self.exact.iter_mut().zip(&other.exact) {
            let terms = x.values.iter().chain(&x.magnitude);
            let sums = sum.values.iter_mut().chain(&mut sum.magnitude);
            sums.zip(terms).for_each(|(sum, x)| *sum += x);
        }
        for (sum, x) in self.naive.iter_mut().zip(&other.naive) {
            sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        }
    }

    fn finish(self, p: &Problem, rows: Vec<usize>) -> SampledKeys {
        let sampled = |width, exact, naive: Vec<f32>, round: bool| Sampled {
            rows: rows.clone(),
            width,
            exact,
            naive: naive
                .into_iter()
                .map(|x| f64::from(if round { round_f32(x, p.element) } else { x }))
                .collect(),
        };
        let ([k, v, scores], [naive_k, naive_v, naive_scores]) = (self.exact, self.naive);
        SampledKeys {
            k: sampled(p.head_dim, k, naive_k, true),
            v: sampled(p.head_dim, v, naive_v, true),
            scores: (p.has_scores).then(|| sampled(1, scores, naive_scores, false)),
        }
    }
}
