//! Gradients of scores and biases of few keys that many queries attend to: where one key takes most of a row's weight,
//! the rounding of `out` must not enter them. The yardstick is automatic differentiation in the same type, which has no
//! such term, without a second seed.

use flash_dma_reference::round::round;
use flash_dma_tests::case::expected_by;
use flash_dma_tests::prelude::*;

every_engine!(of_scores, of_biases_of_keys, of_biases_of_pairs);

on_burn_cpu!(of_scores);

/// Queries, keys, window, and true if they are causal.
type Row = (usize, usize, usize, bool);

/// The problems; the first is that of the issue.
fn rows<E: Engine>() -> Vec<(Row, ElementType)> {
    let rows = E::cases(
        [(1702, 16, 3, false)],
        [
            (1702, 1702, 3, false),
            (1500, 700, 1, false),
            (1513, 1600, 2, true),
            (2049, 2049, 16, false),
            (1801, 1801, 16, true),
        ],
        [(4099, 8193, 8, true), (1999, 1999, 5, false)],
    );
    let types = |row| [Bf16, F16].map(|element| (row, element));
    rows.into_iter().flat_map(types).collect()
}

/// Head dimensions of each kind of engine. With short rows the rounding of `out` shows where few keys are there.
fn dims<E: Engine>() -> Vec<usize> {
    E::cases_or_device([16], [64], [64, 128])
}

fn of_scores<E: Engine>(engine: &E) {
    let rows = engine.supported(rows::<E>(), |&(_, element)| element);
    for ((q_len, k_len, window, causal), element) in rows {
        for dim in dims::<E>() {
            let mut case = Case::new(q_len, k_len).dim(dim).element(element);
            case = case.options(|o| o.with_causal(causal)).window(window);
            case.batch = 1;
            // Score differences of a few units, and products of less: one key dominates all rows, more or less.
            case.options.scale = Some(0.01);
            for spread in E::cases_or_device([1.0, 4.0, 16.0], [], [1.0, 16.0]) {
                let mut inputs = case.inputs();
                let scores = inputs.scores.iter_mut().flatten();
                scores.for_each(|z| *z = f64::from((spread * *z) as f32));
                let mut grads = gradients(&inputs.problem, case.seed);
                grads.lse = grads.lse.filter(|_| spread > 1.0);
                let call = engine.call(&inputs, case.layout, &grads);
                let (outputs, actual) = engine.backward(&call).expect("a good case");
                let scores = actual.scores.as_ref().expect("there are scores");
                let (grad_out, grad_lse) = grads.parts();
                let naive = inputs.naive_autograd(grad_out, grad_lse);
                let actual = [&actual.q, &actual.k, &actual.v, scores].map(|grad| &grad[..]);
                let what = format!("{} at {case:?}, scores times {spread}", E::NAME);
                let expected = expected_by(&inputs, &grads, naive);
                expected.check(Vec::new, &outputs, &actual, what);
            }
        }
    }
}

/// A bias per key that all queries share.
fn of_biases_of_keys<E: MaskedEngine>(engine: &E) {
    for ((q_len, k_len, window, causal), element) in rows::<E>() {
        let mut case = MaskedCase::new([1, 2, 1, q_len, k_len, 64]).causal(causal);
        case.options.scale = Some(0.01);
        // All or most queries see the same few keys.
        let few = Pattern::Columns((k_len / window).max(1));
        let case = case.bias([1, 1, 1, k_len]).mask([1, 1, q_len, k_len], few);
        check_biases(engine, &case.element(element));
    }
}

/// A bias that differs from query to query, but not between the heads: its gradient sums few terms.
fn of_biases_of_pairs<E: MaskedEngine>(engine: &E) {
    for ((q_len, _, k_len, causal), element) in rows::<E>() {
        let case = MaskedCase::new([1, 2, 1, q_len, k_len, 64]).causal(causal);
        let case = case.bias([1, 1, q_len, k_len]);
        check_biases(engine, &case.element(element));
    }
}

/// Random gradients of `out` that have one direction in common, as those of a mean loss have, and of the LSE: common
/// roundings of rows that are nearly the same add up.
fn gradients(problem: &Problem, seed: u64) -> Grads {
    let mut grads = Grads::random(problem, seed);
    let (dim, element) = (problem.head_dim, problem.element);
    let common = generate::normal(dim, 1.0, element, &mut Rng::new(seed ^ 0x6f75_7400));
    for row in grads.out.chunks_exact_mut(dim) {
        for (x, common) in row.iter_mut().zip(&common) {
            *x = round(common + *x / 4.0, element);
        }
    }
    grads
}

fn check_biases<E: MaskedEngine>(engine: &E, case: &MaskedCase) {
    if engine.lacks(case.element) {
        return;
    }
    let mut inputs = case.inputs();
    let bias = inputs.bias.iter_mut().flat_map(|bias| &mut bias.values);
    bias.for_each(|z| *z = f64::from((4.0 * *z) as f32));
    let grads = gradients(&inputs.problem, case.seed).without_lse();
    let naive = inputs.naive_autograd(&grads.out, None);
    let expected = MaskedCase::expected_by(&inputs, &grads, naive);
    case.check_expected(engine, &inputs, &grads, &expected, Vec::new);
}
