//! The least cost of a problem: exact pairs, floating-point operations and bytes.
//!
//! Only useful work counts. An engine's additional work (partly filled tiles, extra recomputation) shows as the
//! distance from these numbers.

use crate::Problem;

/// Number of query-key pairs that attend to each other, over all query heads, if no score is −∞ (each −∞ only lowers
/// it). Causal query `i` keeps `min(window, position + 1)` keys.
#[must_use]
pub fn active_pairs(problem: &Problem) -> u128 {
    let rows = |count: u128, keys: i64| count * (keys.max(0) as u128).min(problem.window as u128);
    let heads = (problem.batch * problem.q_heads) as u128;
    if !problem.causal {
        return heads * rows(problem.q_len as u128, problem.k_len as i64);
    }
    // The visible keys grow by one per query: an arithmetic series up to the window, constant after it.
    let first = problem.position(0) + 1;
    let last = problem.position(problem.q_len.max(1) - 1) + 1;
    if problem.q_len == 0 || last <= 0 {
        return 0;
    }
    let sum_to = |n: i64| -> u128 {
        let n = n.max(0) as u128;
        let rising = n.min(problem.window as u128);
        rising * (rising + 1) / 2 + (n - rising) * problem.window as u128
    };
    heads * (sum_to(last) - sum_to(first - 1))
}

/// Floating-point operations of the forward pass: two matrix products of `head_dim` per pair.
#[must_use]
pub fn forward_flops(problem: &Problem) -> u128 {
    4 * problem.head_dim as u128 * active_pairs(problem)
}

/// Floating-point operations of the backward pass: five matrix products of `head_dim` per pair.
#[must_use]
pub fn backward_flops(problem: &Problem) -> u128 {
    10 * problem.head_dim as u128 * active_pairs(problem)
}

/// Bytes of the forward pass if every input is read once and every output written once.
#[must_use]
pub fn forward_bytes(problem: &Problem) -> u128 {
    let (q, kv, scores, lse) = sizes(problem);
    // A score and an interval per key.
    let selection = if problem.has_scores { 12 * scores } else { 0 };
    // The LSE is in two parts.
    problem.element.size() as u128 * (2 * q + 2 * kv) + 8 * lse + selection
}

/// Bytes of the backward pass if every input is read once and every output written once.
#[must_use]
pub fn backward_bytes(problem: &Problem) -> u128 {
    let (q, kv, scores, lse) = sizes(problem);
    // A score, its gradient and an interval per key.
    let selection = if problem.has_scores { 16 * scores } else { 0 };
    problem.element.size() as u128 * (4 * q + 4 * kv) + 8 * lse + selection
}

/// Number of elements of `q`, of `k`, of the scores and of the LSE.
fn sizes(problem: &Problem) -> (u128, u128, u128, u128) {
    (
        count(&problem.q_shape()),
        count(&problem.kv_shape()),
        count(&problem.scores_shape()),
        count(&problem.lse_shape()),
    )
}

pub(crate) fn count(shape: &[usize]) -> u128 {
    shape.iter().map(|&n| n as u128).product()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionOptions, ElementType};

    fn problem(q_len: usize, k_len: usize, options: AttentionOptions) -> Problem {
        let (q, k) = ([2, 4, q_len, 8], [2, 2, k_len, 8]);
        Problem::new(&q, &k, &k, Some(&k[..3]), ElementType::F16, &options).unwrap()
    }

    #[test]
    fn active_pairs_equal_a_count_over_every_query() {
        for (q_len, k_len) in [(0, 3), (1, 1), (5, 5), (3, 9), (9, 3), (4, 0), (17, 40)] {
            for causal in [false, true] {
                for window in [1, 2, 4, 100] {
                    let options = AttentionOptions::new().with_causal(causal);
                    let p = problem(q_len, k_len, options.with_keep_window(window));
                    let kept = |i| (p.position(i) + 1).clamp(0, window as i64);
                    let count: i64 = (0..q_len).map(kept).sum();
                    assert_eq!(active_pairs(&p), 8 * count as u128, "{p:?}");
                }
            }
        }
    }

    #[test]
    fn costs_of_a_long_problem_do_not_overflow() {
        let p = problem(1 << 22, 1 << 22, AttentionOptions::new());
        let pairs = 8 * (1u128 << 22) * ((1 << 22) + 1) / 2;
        assert_eq!(forward_flops(&p), 32 * pairs);
        assert_eq!(backward_flops(&p), 80 * pairs);
        assert!(backward_bytes(&p) > forward_bytes(&p));
    }
}
