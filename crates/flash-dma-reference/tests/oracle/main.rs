//! The oracle against closed forms, central differences and itself.

mod alibi;
mod attention;
mod composition;
mod dropout;
mod gradients;
mod sampled;
mod selection;

use flash_dma_problem::{AttentionOptions, ElementType, Problem};
use flash_dma_reference::Inputs;
use flash_dma_reference::masked::{Broadcast, MaskedInputs};

/// A problem of two sequences in f32: `[q_heads, q_len, head_dim]` and `[kv_heads, k_len]`.
fn problem(q: [usize; 3], k: [usize; 2], scores: bool, options: AttentionOptions) -> Problem {
    let (q, k) = ([2, q[0], q[1], q[2]], [2, k[0], k[1], q[2]]);
    let scores = scores.then_some(&k[..3]);
    Problem::new(&q, &k, &k, scores, ElementType::F32, &options).unwrap()
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// The same q, k and v under a mask and a bias instead of the scores.
fn masked(
    inputs: &Inputs,
    visible: Option<Broadcast<bool>>,
    bias: Option<Broadcast<f64>>,
) -> MaskedInputs {
    let mut problem = inputs.problem;
    problem.has_scores = false;
    MaskedInputs {
        problem,
        q: inputs.q.clone(),
        k: inputs.k.clone(),
        v: inputs.v.clone(),
        visible,
        bias,
    }
}
