//! The checks of selection, forward and backward pass before timing.

use super::buffers::Buffers;
use crate::check::{check_row, dot, row};
use cubecl::client::Client;
use flash_dma_problem::{ElementType, Interval, Problem};
use flash_dma_reference::Rng;
use flash_dma_reference::round::{epsilon, round_f32};

/// Sampled rows of each gradient.
const SAMPLES: usize = 8;

/// What the passes read and wrote, on the host.
struct Results<'a> {
    buffers: &'a Buffers,
    intervals: Option<Vec<Interval>>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl<'a> Results<'a> {
    fn read(client: &Client, buffers: &'a Buffers) -> Self {
        Self {
            buffers,
            intervals: buffers.read_intervals(client),
            out: buffers.out.read_as(client, buffers.problem.element),
            lse: buffers.lse.read_as(client, ElementType::F32),
        }
    }

    fn problem(&self) -> &Problem {
        &self.buffers.problem
    }

    /// Whether a query attends to a key of a kv head.
    fn selected(&self, kv: usize, query: usize, key: usize) -> bool {
        let p = self.problem();
        match &self.intervals {
            Some(all) => all[kv * p.k_len + key].contains(p.position(query)),
            None => key as i64 <= p.position(query),
        }
    }

    /// The logit of a query of head `head`, counted over all sequences, and a key.
    fn logit(&self, head: usize, query: usize, key: usize) -> f64 {
        let (p, host) = (self.problem(), &self.buffers.host);
        let kv_row = head / p.group() * p.k_len + key;
        let score = host.scores.get(kv_row).copied().unwrap_or(0.0);
        let slope = p.slope(head % p.q_heads).map_or(0.0, f64::from);
        f64::from(p.scale) * self.dot(&host.q, head * p.q_len + query, &host.k, kv_row)
            + f64::from(score)
            - slope * p.distance(query, key) as f64
    }

    fn dot(&self, a: &[f32], a_row: usize, b: &[f32], b_row: usize) -> f64 {
        let d = self.problem().head_dim;
        dot(&a[a_row * d..][..d], &b[b_row * d..][..d])
    }

    /// What a pair adds to the gradients: its probability, and the gradient of its logit.
    fn pair(&self, head: usize, query: usize, key: usize) -> [f64; 2] {
        let (p, host) = (self.problem(), &self.buffers.host);
        let (row, kv_row) = (head * p.q_len + query, head / p.group() * p.k_len + key);
        let weight = (self.logit(head, query, key) - f64::from(self.lse[row])).exp();
        let mean = self.dot(&host.grad_out, row, &self.out, row);
        let kept = f64::from(p.dropout_weights(head, query)(key));
        let slope = kept * self.dot(&host.grad_out, row, &host.v, kv_row) - mean;
        [weight * kept, weight * slope]
    }
}

/// Compares every interval with a heap's and sampled rows of `out` and `lse` with f64. Panics if a result is wrong.
pub fn check_forward(client: &Client, buffers: &Buffers) {
    let (p, host) = (&buffers.problem, &buffers.host);
    let results = Results::read(client, buffers);
    if let Some(all) = &results.intervals {
        let rows = host.scores.chunks(p.k_len).zip(all.chunks(p.k_len));
        for (number, (scores, got)) in rows.enumerate() {
            let scores: Vec<f64> = scores.iter().map(|&z| f64::from(z)).collect();
            let want = flash_dma_reference::select::intervals_by_heap(&scores, p.window);
            assert!(want == got, "wrong intervals in row {number}");
        }
    }
    let mut rng = Rng::new(11);
    for _ in 0..16 {
        let (head, query) = (rng.below(p.batch * p.q_heads), rng.below(p.q_len));
        let kv = head / p.group();
        let logits: Vec<_> = (0..p.k_len)
            .filter(|&key| results.selected(kv, query, key))
            .map(|key| (key, results.logit(head, query, key)))
            .collect();
        let at = head * p.q_len + query;
        let got = (results.lse[at], &row(&results.out, at, p.head_dim)[..]);
        let value = |key| row(&host.v, kv * p.k_len + key, p.head_dim);
        check_row(p, [head, query], &logits, got, value);
    }
}

/// Compares sampled rows of every gradient with f64: within 3 times the error of a naive implementation of the same
/// type, and its last rounding. The forward pass has been checked: its LSE and output are taken as they are. Panics if
/// a result is wrong.
pub fn check_gradients(client: &Client, buffers: &Buffers) {
    let (p, host) = (&buffers.problem, &buffers.host);
    let (d, element) = (p.head_dim, p.element);
    let results = Results::read(client, buffers);
    let [dq, dk, dv] = (buffers.grads.each_ref()).map(|tensor| tensor.read_as(client, element));
    let dz = (buffers.grad_scores.as_ref()).map(|tensor| tensor.read_as(client, ElementType::F32));
    let mut rng = Rng::new(13);

    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        let (head, query) = (rng.below(p.batch * p.q_heads), rng.below(p.q_len));
        let (kv, at) = (head / p.group(), head * p.q_len + query);
        let what = format!("dq of head {head} query {query}");
        let mut sample = Sample::new(what, row(&dq, at, d), element);
        for key in (0..p.k_len).filter(|&key| results.selected(kv, query, key)) {
            let [_, ds] = results.pair(head, query, key);
            let k = row(&host.k, kv * p.k_len + key, d);
            sample.add(f64::from(p.scale) * ds, &k);
        }
        samples.push(sample);
    }
    compare(&samples, element);

    let (mut k_samples, mut v_samples, mut z_samples) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..SAMPLES {
        let kv = rng.below(p.batch * p.kv_heads);
        // Every second key is one that some query attends to.
        let mut key = rng.below(p.k_len);
        while n % 2 == 0 && !(0..p.q_len).any(|query| results.selected(kv, query, key)) {
            key = rng.below(p.k_len);
        }
        let at = kv * p.k_len + key;
        let sample =
            |name, got| Sample::new(format!("{name} of head {kv} key {key}"), got, element);
        let mut k_sample = sample("dk", row(&dk, at, d));
        let mut v_sample = sample("dv", row(&dv, at, d));
        let mut z_sample = dz.as_ref().map(|dz| sample("dscores", row(dz, at, 1)));
        for query in (0..p.q_len).filter(|&query| results.selected(kv, query, key)) {
            for head in kv * p.group()..(kv + 1) * p.group() {
                let [probability, ds] = results.pair(head, query, key);
                let at = head * p.q_len + query;
                k_sample.add(f64::from(p.scale) * ds, &row(&host.q, at, d));
                v_sample.add(probability, &row(&host.grad_out, at, d));
                if let Some(sample) = &mut z_sample {
                    sample.add(ds, &[1.0]);
                }
            }
        }
        k_samples.push(k_sample);
        v_samples.push(v_sample);
        z_samples.extend(z_sample);
    }
    compare(&k_samples, element);
    compare(&v_samples, element);
    compare(&z_samples, ElementType::F32);
}

/// A sampled row: the engine's, and the sum of what pairs add to it, in f64 and as in an implementation that rounds its
/// weights to the element type.
struct Sample {
    what: String,
    got: Vec<f64>,
    element: ElementType,
    exact: Vec<f64>,
    naive: Vec<f32>,
}

impl Sample {
    fn new(what: String, got: Vec<f64>, element: ElementType) -> Self {
        let (exact, naive) = (vec![0.0; got.len()], vec![0.0; got.len()]);
        Self {
            what,
            got,
            element,
            exact,
            naive,
        }
    }

    fn add(&mut self, weight: f64, row: &[f64]) {
        let rounded = round_f32(weight as f32, self.element);
        for ((exact, naive), &x) in self.exact.iter_mut().zip(&mut self.naive).zip(row) {
            *exact += weight * x;
            *naive += rounded * x as f32;
        }
    }
}

/// Compares the rows of one gradient, which is of this type.
fn compare(samples: &[Sample], element: ElementType) {
    let errors = samples.iter().flat_map(|s| s.naive.iter().zip(&s.exact));
    let naive = errors.fold(0.0f64, |most, (&a, b)| most.max((f64::from(a) - b).abs()));
    for sample in samples {
        for (c, (got, want)) in sample.got.iter().zip(&sample.exact).enumerate() {
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
