//! Decoding as a forward pass.

use flash_dma_problem::{AttentionError, AttentionOptions, DecodeProblem, Problem};

/// The problem of a forward pass with `len` keys, whose last are the tokens.
pub(crate) fn forward_problem(
    problem: &DecodeProblem,
    q: [usize; 4],
    len: usize,
    window: Option<usize>,
) -> Result<Problem, AttentionError> {
    let cache = problem.append.cache;
    let kv = [q[0], cache.kv_heads, len, cache.head_dim];
    let options = AttentionOptions {
        keep_window: window,
        scale: Some(problem.scale),
        softcap: problem.softcap,
        ..AttentionOptions::new()
    };
    let scores = window.map(|_| &kv[..3]);
    Problem::new(&q, &kv, &kv, scores, cache.element, &options)
}
