//! The check of a row before timing: wrong kernels are not worth timing.

use flash_dma_problem::{ElementType, Problem};

/// Compares the LSE and the output of a query with f64: of a head, counted over all sequences as all heads here, given
/// the logit of each key that it attends to, and the values of a key. Panics if a result is wrong.
pub fn check_row(
    problem: &Problem,
    [head, query]: [usize; 2],
    logits: &[(usize, f64)],
    (lse, out): (f32, &[f64]),
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
    // One rounding of the output on top of f32 arithmetic.
    let ulp = match problem.element {
        ElementType::F32 => 1e-5,
        ElementType::F16 => 1e-3,
        ElementType::Bf16 => 8e-3,
    };
    let size = exact.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    for (column, (got, want)) in out.iter().zip(&exact).enumerate() {
        assert!(
            (got - want).abs() <= 2.0 * ulp * size,
            "out {of} column {column}: {got} instead of {want}"
        );
    }
}

/// A row of a host tensor.
pub fn row<T: Copy + Into<f64>>(data: &[T], at: usize, dim: usize) -> Vec<f64> {
    data[at * dim..(at + 1) * dim]
        .iter()
        .map(|&x| x.into())
        .collect()
}

/// The dot product.
pub fn dot<A: Copy + Into<f64>, B: Copy + Into<f64>>(a: &[A], b: &[B]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| a.into() * b.into()).sum()
}
