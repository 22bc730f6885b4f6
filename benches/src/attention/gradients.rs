//! The check of the backward pass before timing.

use super::buffers::{Buffers, Host};
use super::check::{alibi, sees};
use crate::check::{dot, row};
use cubecl::client::Client;
use flash_dma_problem::{ElementType, Interval};
use flash_dma_reference::Rng;
use flash_dma_reference::round::{epsilon, round_f32};

/// Sampled rows of each gradient.
const SAMPLES: usize = 8;

/// The inputs of the gradients, on the host. The forward pass has been checked: its LSE and output are taken as they
/// are.
struct Pairs<'a> {
    buffers: &'a Buffers,
    host: &'a Host,
    intervals: Option<Vec<Interval>>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

/// The contribution of one pair to the gradients.
struct Pair {
    p: f64,
    ds: f64,
}

/// A sampled row: the engine's, the exact one, and that of an implementation that rounds its weights to the element
/// type.
struct Sample {
    what: String,
    got: Vec<f64>,
    want: Vec<f64>,
    naive: Vec<f64>,
}

/// Compares sampled rows of every gradient with f64: within 3 times the error of a naive implementation
/// of the same type, and its last rounding.
///
/// # Panics
///
/// If a result is wrong.
pub fn check_gradients(client: &Client, buffers: &Buffers, host: &Host) {
    let p = &buffers.problem;
    let f32_type = ElementType::F32;
    let pairs = Pairs {
        buffers,
        host,
        intervals: buffers.read_intervals(client),
        out: buffers.out.read_as(client, p.element),
        lse: buffers.lse.read_as(client, f32_type),
    };
    let [dq, dk, dv] = (buffers.grads.each_ref()).map(|tensor| tensor.read_as(client, p.element));
    let dz = (buffers.grad_scores.as_ref()).map(|tensor| tensor.read_as(client, f32_type));
    let d = p.head_dim;
    let row = |data: &[f32], at: usize| row(data, at, d);
    let mut rng = Rng::new(13);

    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        let (head, query) = (rng.below(p.batch * p.q_heads), rng.below(p.q_len));
        let kv = head / p.group();
        let mut sums = Sums::new(d);
        for key in (0..p.k_len).filter(|&key| pairs.selected(kv, query, key)) {
            let pair = pairs.pair(head, query, key);
            sums.add(
                f64::from(p.scale) * pair.ds,
                &row(&host.k, kv * p.k_len + key),
                p.element,
            );
        }
        let at = head * p.q_len + query;
        samples.push(sums.sample(format!("dq of head {head} query {query}"), row(&dq, at)));
    }
    compare(&samples, p.element);

    let (mut k_samples, mut v_samples, mut z_samples) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..SAMPLES {
        let kv = rng.below(p.batch * p.kv_heads);
        // Every second key is one that some query attends to.
        let mut key = rng.below(p.k_len);
        while n % 2 == 0 && !(0..p.q_len).any(|query| pairs.selected(kv, query, key)) {
            key = rng.below(p.k_len);
        }
        let [mut k_sums, mut v_sums] = [Sums::new(d), Sums::new(d)];
        let (mut score, mut naive_score) = (0.0, 0.0f32);
        for query in (0..p.q_len).filter(|&query| pairs.selected(kv, query, key)) {
            for head in kv * p.group()..(kv + 1) * p.group() {
                let pair = pairs.pair(head, query, key);
                let at = head * p.q_len + query;
                k_sums.add(f64::from(p.scale) * pair.ds, &row(&host.q, at), p.element);
                v_sums.add(pair.p, &row(&host.grad_out, at), p.element);
                score += pair.ds;
                naive_score += round_f32(pair.ds as f32, p.element);
            }
        }
        let at = kv * p.k_len + key;
        let what = |name| format!("{name} of head {kv} key {key}");
        k_samples.push(k_sums.sample(what("dk"), row(&dk, at)));
        v_samples.push(v_sums.sample(what("dv"), row(&dv, at)));
        if let Some(dz) = &dz {
            z_samples.push(Sample {
                what: what("dscores"),
                got: vec![f64::from(dz[at])],
                want: vec![score],
                naive: vec![f64::from(naive_score)],
            });
        }
    }
    compare(&k_samples, p.element);
    compare(&v_samples, p.element);
    compare(&z_samples, f32_type);
}

impl Pairs<'_> {
    fn selected(&self, kv: usize, query: usize, key: usize) -> bool {
        let intervals = self.intervals.as_deref();
        sees(&self.buffers.problem, intervals, kv, query, key)
    }

    fn pair(&self, head: usize, query: usize, key: usize) -> Pair {
        let p = &self.buffers.problem;
        let (row, kv_row) = (head * p.q_len + query, head / p.group() * p.k_len + key);
        let d = p.head_dim;
        let dot = |a: &[f32], a_row: usize, b: &[f32], b_row: usize| {
            dot(&a[a_row * d..][..d], &b[b_row * d..][..d])
        };
        let (host, score) = (self.host, self.host.scores.get(kv_row));
        let logit = f64::from(p.scale) * dot(&host.q, row, &host.k, kv_row)
            + f64::from(score.copied().unwrap_or(0.0))
            - alibi(p, head, query, key);
        let weight = (logit - f64::from(self.lse[row])).exp();
        let mean = dot(&host.grad_out, row, &self.out, row);
        let kept = f64::from(p.dropout_weights(head, query)(key));
        let slope = kept * dot(&host.grad_out, row, &host.v, kv_row) - mean;
        Pair {
            p: weight * kept,
            ds: weight * slope,
        }
    }
}

/// A row that pairs accumulate into, in f64 and as in a naive implementation.
struct Sums {
    exact: Vec<f64>,
    naive: Vec<f32>,
}

impl Sums {
    fn new(head_dim: usize) -> Self {
        Self {
            exact: vec![0.0; head_dim],
            naive: vec![0.0; head_dim],
        }
    }

    fn add(&mut self, weight: f64, row: &[f64], element: ElementType) {
        let rounded = round_f32(weight as f32, element);
        for ((exact, naive), &x) in self.exact.iter_mut().zip(&mut self.naive).zip(row) {
            *exact += weight * x;
            *naive += rounded * x as f32;
        }
    }

    fn sample(self, what: String, got: Vec<f64>) -> Sample {
        Sample {
            what,
            got,
            want: self.exact,
            naive: self.naive.into_iter().map(f64::from).collect(),
        }
    }
}

fn compare(samples: &[Sample], element: ElementType) {
    let errors = samples.iter().flat_map(|s| s.naive.iter().zip(&s.want));
    let naive = errors.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    for sample in samples {
        for (c, (got, want)) in sample.got.iter().zip(&sample.want).enumerate() {
            // The error of the arithmetic itself, for tensors whose naive sums are exact.
            let allowed = 3.0 * naive + epsilon(element) * want.abs() + 1e-5;
            assert!(
                (got - want).abs() <= allowed,
                "{} column {c}: {got} instead of {want}, {allowed} allowed",
                sample.what
            );
        }
    }
}
