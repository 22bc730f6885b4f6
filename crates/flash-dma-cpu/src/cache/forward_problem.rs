//! Decoding as a forward pass.

use flash_dma_problem::{AttentionError, AttentionOptions, DecodeProblem, Problem};

/// Where a decode step writes.
pub(crate) struct Outputs<'a, E> {
    /// Contiguous `[batch, q_heads, tokens, head_dim]`.
    pub(crate) out: &'a mut [E],
    /// Contiguous `[batch, q_heads, tokens]`.
    pub(crate) lse: &'a mut [f32],
}

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
