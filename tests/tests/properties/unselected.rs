//! A row does not depend on keys that it does not select: corrupting or permuting them changes nothing.

use super::{Change, bits_of, call, outputs, results};
use flash_dma_reference::select;
use flash_dma_tests::case;
use flash_dma_tests::prelude::*;

every_engine!(
    corrupted_keys_touch_only_their_rows,
    corrupted_keys_that_none_selects_change_nothing,
    permuted_keys_that_none_selects_change_nothing,
);

/// Every type, groups of heads, few of many keys selected.
fn problems<E: Engine>(engine: &E) -> Vec<Case> {
    let case = |len, dim, element: ElementType| {
        let case = Case::new(len, len).dim(dim).element(element);
        case.options(|o| o.with_deterministic(true))
    };
    let cases = E::cases(
        [case(64, 16, F32).heads(2, 2).window(4)],
        [
            case(150, 64, Bf16).heads(4, 2).window(5),
            case(140, 32, F16).heads(3, 1).window(5),
            case(200, 40, F32).heads(8, 2).window(7),
        ],
        [
            case(1500, 128, Bf16).heads(8, 2).window(20),
            case(1300, 64, F16).heads(3, 1).window(20),
        ],
    );
    engine.supported(cases, |case| case.element)
}

/// Rows that select a corrupted key become NaN. In f32 the others keep every bit; in 16 bits a tensor-core kernel
/// rescales the rows of a warp together, so they keep it within rounding.
fn corrupted_keys_touch_only_their_rows<E: Engine>(engine: &E) {
    for case in problems(engine) {
        let (len, dim, group) = (case.k_len, case.head_dim, case.q_heads / case.kv_heads);
        let mut inputs = case.inputs();
        let grads = Grads::random(&inputs.problem, 1);
        let expected = case::expected(&inputs, &grads);
        let clean = outputs(engine, &inputs);
        let corrupted = [2, 11, len / 2 - 2, len / 2 - 1, 3 * len / 4 - 1];
        for head in 0..case.batch * case.kv_heads {
            for key in corrupted {
                let at = (head * len + key) * dim;
                inputs.k[at..at + dim].fill(f64::NAN);
                inputs.v[at..at + dim].fill(-f64::INFINITY);
            }
        }
        let dirty = outputs(engine, &inputs);
        let scores = inputs.scores.as_ref().expect("the case has scores");
        let window = inputs.problem.window;
        let touched: Vec<bool> = (0..case.batch * case.q_heads * len)
            .map(|row| {
                let head = &scores[row / len / group * len..][..len];
                let selected = select::selected(head, window, (row % len) as i64);
                selected.iter().any(|key| corrupted.contains(key))
            })
            .collect();
        for row in (0..touched.len()).filter(|&row| touched[row]) {
            assert!(dirty.lse[row].is_nan(), "row {row} of {case:?}");
            let out = &dirty.out[row * dim..(row + 1) * dim];
            assert!(out.iter().all(|x| x.is_nan()), "row {row} of {case:?}");
        }
        let tensors = [
            ("out", clean.out, dirty.out, dim),
            ("lse", clean.lse, dirty.lse, 1),
        ];
        for (name, clean, dirty, width) in tensors {
            let what = format!("{} at {case:?}", E::NAME);
            if case.element == F32 {
                let kept = (0..clean.len()).filter(|at| !touched[at / width]);
                for at in kept {
                    assert_eq!(clean[at], dirty[at], "{what}: {name}[{at}]");
                }
            } else {
                expected.check_same(name, &clean, &dirty, |row| !touched[row], what);
            }
        }
        let kept = touched.iter().filter(|&&touched| !touched).count();
        assert!(
            (20..touched.len() - 20).contains(&kept),
            "{kept} rows tell little"
        );
    }
}

/// The rows of k, v and the scores that no query selects, of all heads.
fn never_selected(case: &Case, inputs: &Inputs, intervals: &[Interval]) -> Vec<usize> {
    let position = inputs.problem.position(0).max(0) as u32;
    let never = |interval: &Interval| interval.is_empty() || interval.end <= position;
    let rows: Vec<usize> = (0..intervals.len())
        .filter(|&row| never(&intervals[row]))
        .collect();
    let (heads, least) = (case.batch * case.kv_heads, case.k_len / 3);
    let count = rows.len();
    assert!(count > heads * least, "{count} keys tell little");
    rows
}

fn assert_bit_equal<E: Engine>(engine: &E, inputs: [&Inputs; 2], grads: &Grads, what: &str) {
    let [clean, dirty] = inputs.map(|inputs| results(engine, &call(engine, inputs, grads)));
    for ((name, clean), (_, dirty)) in clean.iter().zip(&dirty) {
        assert!(bits_of(clean) == bits_of(dirty), "{what}: another {name}");
    }
}

/// Not even the keys' scores matter, as long as they stay below those that are selected.
fn corrupted_keys_that_none_selects_change_nothing<E: Engine>(engine: &E) {
    for case in problems(engine) {
        let inputs = case.inputs();
        let grads = Grads::random(&inputs.problem, 1);
        let intervals = call(engine, &inputs, &grads).intervals.expect("scored");
        let never = never_selected(&case, &inputs, &intervals);
        let (dim, mut rng) = (case.head_dim, Rng::new(case.seed));
        let infinite = Change::Filled(f64::INFINITY);
        for (n, change) in Change::ALL.into_iter().chain([infinite]).enumerate() {
            let mut dirty = inputs.clone();
            for &row in &never {
                let elements = row * dim..(row + 1) * dim;
                change.write(&mut dirty.k[elements.clone()], case.element, &mut rng);
                change.write(&mut dirty.v[elements], case.element, &mut rng);
                let score = &mut dirty.scores.as_mut().expect("scored")[row];
                *score = [f64::NEG_INFINITY, f64::NAN, *score, *score - 1.0][n % 4];
                *score = f64::from(*score as f32);
            }
            let what = format!("{}, {change:?} in {case:?}", E::NAME);
            let again = call(engine, &dirty, &grads).intervals;
            assert!(
                again.as_ref() == Some(&intervals),
                "{what}: another selection"
            );
            assert_bit_equal(engine, [&inputs, &dirty], &grads, &what);
        }
    }
}

/// Without causal masking keys that nothing selects may change their places with each other.
fn permuted_keys_that_none_selects_change_nothing<E: Engine>(engine: &E) {
    for case in problems(engine) {
        let case = case.full();
        let inputs = case.inputs();
        let grads = Grads::random(&inputs.problem, 1);
        let intervals = call(engine, &inputs, &grads).intervals.expect("scored");
        let never = never_selected(&case, &inputs, &intervals);
        let (dim, mut permuted) = (case.head_dim, inputs.clone());
        for head in never.chunk_by(|a, b| a / case.k_len == b / case.k_len) {
            for (n, &to) in head.iter().enumerate() {
                let from = head[(n + head.len() / 3) % head.len()];
                for (into, rows) in [(&mut permuted.k, &inputs.k), (&mut permuted.v, &inputs.v)] {
                    into[to * dim..(to + 1) * dim]
                        .copy_from_slice(&rows[from * dim..(from + 1) * dim]);
                }
                let scores = inputs.scores.as_ref().expect("scored");
                permuted.scores.as_mut().expect("scored")[to] = scores[from];
            }
        }
        assert!(permuted.k != inputs.k);
        let what = format!("{} at {case:?}", E::NAME);
        assert_bit_equal(engine, [&inputs, &permuted], &grads, &what);
    }
}
