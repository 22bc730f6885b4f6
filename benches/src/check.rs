//! The check before timing: wrong kernels are not worth timing.

use crate::buffers::{Buffers, Host, decode, read, words};
use cubecl::client::Client;
use flash_dma_problem::{ElementType, Interval, Problem};
use flash_dma_reference::Rng;

/// Compares every interval with a heap's and sampled rows of `out` and `lse` with f64.
///
/// # Panics
///
/// If a result is wrong.
pub fn check(client: &Client, buffers: &Buffers, host: &Host) {
    let p = &buffers.problem;
    let intervals: Option<Vec<Interval>> = buffers.scores.as_ref().map(|(_, intervals)| {
        let got: Vec<Interval> = words(&read(client, intervals))
            .chunks_exact(2)
            .map(|w| Interval {
                first: w[0],
                end: w[1],
            })
            .collect();
        for (row, (scores, got)) in host
            .scores
            .chunks(p.k_len)
            .zip(got.chunks(p.k_len))
            .enumerate()
        {
            let scores: Vec<f64> = scores.iter().map(|&z| f64::from(z)).collect();
            let want = flash_dma_reference::select::intervals_by_heap(&scores, p.window);
            assert!(want == got, "wrong intervals in row {row}");
        }
        got
    });
    let out = decode(&read(client, &buffers.out), p.element);
    let lse: Vec<f32> = decode(&read(client, &buffers.lse), ElementType::F32);
    let mut rng = Rng::new(11);
    for _ in 0..16 {
        let head = rng.below(p.batch * p.q_heads);
        let query = rng.below(p.q_len);
        let kv = head / p.group();
        let d = p.head_dim;
        let row = |data: &[f32], at: usize| -> Vec<f64> {
            data[at * d..(at + 1) * d]
                .iter()
                .map(|&x| f64::from(x))
                .collect()
        };
        let q = row(&host.q, head * p.q_len + query);
        let keys: Vec<usize> = (0..p.k_len)
            .filter(|&j| match &intervals {
                Some(all) => all[kv * p.k_len + j].contains(p.position(query)),
                None => j as i64 <= p.position(query),
            })
            .collect();
        let logits: Vec<f64> = keys
            .iter()
            .map(|&j| {
                let k = row(&host.k, kv * p.k_len + j);
                let dot: f64 = q.iter().zip(&k).map(|(a, b)| a * b).sum();
                let score = host.scores.get(kv * p.k_len + j).copied().unwrap_or(0.0);
                f64::from(p.scale) * dot + f64::from(score) - alibi(p, head, query, j)
            })
            .collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
        let mut want = vec![0.0; d];
        let kept = p.dropout_weights(head, query);
        for (&j, x) in keys.iter().zip(&logits) {
            let weight = f64::from(kept(j)) * (x - max).exp() / sum;
            for (w, v) in want.iter_mut().zip(row(&host.v, kv * p.k_len + j)) {
                *w += weight * v;
            }
        }
        let at = head * p.q_len + query;
        let want_lse = max + sum.ln();
        assert!(
            (f64::from(lse[at]) - want_lse).abs() < 1e-4,
            "lse of head {head} query {query}: {} instead of {want_lse}",
            lse[at]
        );
        // One rounding of the output on top of f32 arithmetic.
        let ulp = match p.element {
            ElementType::F32 => 1e-5,
            ElementType::F16 => 1e-3,
            ElementType::Bf16 => 8e-3,
        };
        let scale = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        for (c, w) in want.iter().enumerate() {
            let got = f64::from(out[at * d + c]);
            assert!(
                (got - w).abs() <= 2.0 * ulp * scale,
                "out of head {head} query {query} column {c}: {got} instead of {w}"
            );
        }
    }
}

/// What ALiBi takes from the logit of a query of head `head`, counted over all sequences, and a key.
pub(crate) fn alibi(p: &Problem, head: usize, query: usize, key: usize) -> f64 {
    let slope = p.slope(head % p.q_heads).map_or(0.0, f64::from);
    slope * p.distance(query, key) as f64
}
