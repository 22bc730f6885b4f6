//! The check of selection and forward pass before timing.

use super::buffers::{Buffers, Host};
use crate::check::{Row, dot, row};
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
    let intervals = buffers.read_intervals(client);
    if let Some(all) = &intervals {
        let rows = host.scores.chunks(p.k_len).zip(all.chunks(p.k_len));
        for (number, (scores, got)) in rows.enumerate() {
            let scores: Vec<f64> = scores.iter().map(|&z| f64::from(z)).collect();
            let want = flash_dma_reference::select::intervals_by_heap(&scores, p.window);
            assert!(want == got, "wrong intervals in row {number}");
        }
    }
    let out = buffers.out.read_as(client, p.element);
    let lse = buffers.lse.read_as(client, ElementType::F32);
    let mut rng = Rng::new(11);
    for _ in 0..16 {
        let (head, query) = (rng.below(p.batch * p.q_heads), rng.below(p.q_len));
        let (kv, d) = (head / p.group(), p.head_dim);
        let q = &host.q[(head * p.q_len + query) * d..][..d];
        let logit = |key: usize| {
            let at = kv * p.k_len + key;
            let score = host.scores.get(at).copied().unwrap_or(0.0);
            f64::from(p.scale) * dot(q, &host.k[at * d..][..d]) + f64::from(score)
                - alibi(p, head, query, key)
        };
        let logits = (0..p.k_len)
            .filter(|&key| sees(p, intervals.as_deref(), kv, query, key))
            .map(|key| (key, logit(key)))
            .collect();
        let checked = Row {
            problem: p,
            head,
            query,
            logits,
        };
        let at = head * p.q_len + query;
        let value = |key| row(&host.v, kv * p.k_len + key, d);
        checked.check(lse[at], &row(&out, at, d), value);
    }
}

/// Whether a query attends to a key of a kv head.
pub fn sees(
    p: &Problem,
    intervals: Option<&[Interval]>,
    kv: usize,
    query: usize,
    key: usize,
) -> bool {
    match intervals {
        Some(all) => all[kv * p.k_len + key].contains(p.position(query)),
        None => key as i64 <= p.position(query),
    }
}

/// What ALiBi takes from the logit of a query of head `head`, counted over all sequences, and a key.
pub fn alibi(p: &Problem, head: usize, query: usize, key: usize) -> f64 {
    let slope = p.slope(head % p.q_heads).map_or(0.0, f64::from);
    slope * p.distance(query, key) as f64
}
