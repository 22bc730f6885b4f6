//! The check of a row before timing: wrong kernels are not worth timing.

use flash_dma_problem::Problem;
use half::bf16;

/// Compares the LSE and the output of a query with f64, given the logit of each attended key, and the values of a
/// key. Panics if a result is wrong.
pub fn check_row(
    problem: &Problem,
    [head, query]: [usize; 2],
    logits: &[(usize, f64)],
    (lse, out): (f32, &[f32]),
    value: impl Fn(usize) -> Vec<f64>,
) {
    let of = format!("of head {head} query {query}");
    let max = (logits.iter()).fold(f64::NEG_INFINITY, |max, (_, logit)| max.max(*logit));
    let sum: f64 = logits.iter().map(|(_, logit)| (logit - max).exp()).sum();
    let want = max + sum.ln();
    assert!(
        (f64::from(lse) - want).abs() < 1e-4 || logits.is_empty(),
        "lse {of}: {lse} instead of {want}"
    );
    let mut exact = vec![0.0; out.len()];
    let kept = problem.dropout_weights(head, query);
    for &(key, logit) in logits {
        let weight = f64::from(kept(key)) * (logit - max).exp() / sum;
        for (exact, v) in exact.iter_mut().zip(value(key)) {
            *exact += weight * v;
        }
    }
    // Two units of bf16: one rounding of the output on top of f32 arithmetic.
    let allowed = 2.0 * 8e-3 * exact.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    for (column, (&got, want)) in out.iter().zip(&exact).enumerate() {
        assert!(
            (f64::from(got) - want).abs() <= allowed,
            "out {of} column {column}: {got} instead of {want}"
        );
    }
}

/// The dot product.
pub fn dot(a: &[bf16], b: &[bf16]) -> f64 {
    let terms = a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64());
    terms.sum()
}
