//! What the kernel computes, in f64, twice: by its definition, and as a gradient that the oracle of `flash-dma-reference`
//! knows with its bounds.

use flash_dma_kernels::Problem;
use flash_dma_reference::select::selected;
use flash_dma_reference::{Exact, Inputs};

// ANCHOR: definition
/// The attention mass by definition, `[batch, kv_heads, k_len]`: every query of every head of a group hands out its
/// probabilities, and a key adds what it gets.
///
/// # Panics
///
/// If the problem has no scores.
#[must_use]
pub fn by_definition(inputs: &Inputs) -> Vec<f64> {
    let p = &inputs.problem;
    let scores = inputs.scores.as_ref().expect("the problem has scores");
    let mut mass = vec![0.0; scores.len()];
    for head in 0..p.batch * p.q_heads {
        // Heads of all sequences are counted through, so a group's heads are neighbours.
        let first = head / (p.q_heads / p.kv_heads) * p.k_len;
        let scores = &scores[first..first + p.k_len];
        for i in 0..p.q_len {
            let keys = selected(scores, p.window, p.position(i));
            let logits = keys.iter().map(|&j| {
                let q = &inputs.q[(head * p.q_len + i) * p.head_dim..][..p.head_dim];
                let k = &inputs.k[(first + j) * p.head_dim..][..p.head_dim];
                let product: f64 = q.iter().zip(k).map(|(q, k)| q * k).sum();
                capped(p, f64::from(p.scale) * product) + scores[j]
            });
            let weights: Vec<f64> = logits.map(f64::exp).collect();
            let sum: f64 = weights.iter().sum();
            for (j, weight) in keys.into_iter().zip(weights) {
                mass[first + j] += weight / sum;
            }
        }
    }
    mass
}
// ANCHOR_END: definition

fn capped(problem: &Problem, logit: f64) -> f64 {
    let Some(cap) = problem.softcap.map(f64::from) else {
        return logit;
    };
    cap * (logit / cap).tanh()
}

// ANCHOR: gradient
/// The same from the oracle: `out` is the sum of the attended rows of `v` by their probabilities, so where all its
/// gradients are 1, every element of the gradient of a row of `v` is the row's mass.
#[must_use]
pub fn attention_mass(inputs: &Inputs) -> Exact {
    let (p, ones) = (&inputs.problem, vec![1.0; inputs.q.len()]);
    let Exact { values, magnitude } = inputs.backward(&ones, None).v;
    let first = |row: Vec<f64>| row.into_iter().step_by(p.head_dim).collect();
    Exact {
        values: first(values),
        magnitude: first(magnitude),
    }
}
// ANCHOR_END: gradient
