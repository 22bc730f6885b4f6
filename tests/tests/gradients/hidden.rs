//! Gradients and hidden pairs: rows that see nothing, biases of −∞, and NaN and infinities kept to their pairs.

use super::{groups, half_of_problems, problems};
use flash_dma_tests::prelude::*;

tensor_core_engines!(
    of_rows_that_see_nothing,
    what_is_not_finite_stays_with_its_pairs,
    what_is_not_finite_stays_with_what_sees_it,
    infinite_biases_hide_keys,
);

/// Puts `bad` into k, v, q or the gradient of `out`, by `target`, at the `n`-th place in the middle.
fn spoil(inputs: &mut MaskedInputs, grads: &mut Grads, target: usize, n: usize, bad: f64) {
    let (p, dim) = (inputs.problem, inputs.problem.head_dim);
    let (key, query) = ((p.k_len / 2 + 5 * n) * dim, (p.q_len / 2 + n) * dim);
    match target {
        0 => inputs.k[key..key + 3].fill(bad),
        1 => inputs.v[key..key + dim].fill(bad),
        2 => inputs.q[query..query + dim].fill(bad),
        _ => grads.out[query + 2..query + 9].fill(bad),
    }
}

/// Zeros, not NaN, next to rows that see keys, in the same tile and in others.
fn of_rows_that_see_nothing<E: MaskedEngine>(engine: &E) {
    for case in problems::<E>().into_iter().take(2) {
        let [_, _, kv_heads, q_len, k_len, dim] = case.sizes;
        for (mask, pattern) in [
            ([1, kv_heads, q_len, 1], Pattern::Random(0.7)),
            ([1, 1, q_len, k_len], Pattern::Random(0.01)),
            ([1, 1, q_len, k_len], Pattern::Nothing),
        ] {
            let case = case.clone().mask(mask, pattern);
            let case = case.bias([1, kv_heads, 1, k_len]);
            case.check(engine);
            // Queries that see nothing may hold anything.
            let mut inputs = case.inputs();
            let mut grads = case.gradients(&inputs);
            let visible = inputs.visible.as_ref().expect("there is a mask");
            let each = visible.values.len() / (mask[1] * q_len);
            let sees = |i: usize| {
                (0..mask[1]).any(|head| {
                    let row = (head * q_len + i) * each;
                    visible.values[row..row + each].contains(&true)
                })
            };
            let blind: Vec<usize> = (0..q_len).filter(|&i| !sees(i)).collect();
            for (n, &i) in blind.iter().step_by(3).enumerate() {
                let bad = [f64::NAN, f64::INFINITY][n % 2];
                inputs.q[i * dim..(i + 1) * dim].fill(bad);
                grads.out[i * dim..(i + 1) * dim].fill(bad);
            }
            case.check_gradients(engine, &inputs, &grads);
        }
    }
}

/// NaN and infinities of each input, and biases of −∞: in one pair, and in whole rows.
fn what_is_not_finite_stays_with_its_pairs<E: MaskedEngine>(engine: &E) {
    for case in groups::<E>().into_iter().take(2) {
        let [_, _, kv_heads, q_len, k_len, _] = case.sizes;
        for masked in [false, true] {
            let mut case = case.clone().bias([1, kv_heads, q_len, k_len]);
            case.mask = masked.then_some(([1, 1, q_len, k_len], Pattern::Window(75)));
            for (n, bad) in [f64::NAN, f64::INFINITY].into_iter().enumerate() {
                for target in 0..5 {
                    let mut inputs = case.inputs();
                    let mut grads = case.gradients(&inputs);
                    if target < 4 {
                        spoil(&mut inputs, &mut grads, target, n, bad);
                    } else {
                        let bias = inputs.bias.as_mut().expect("the case has one");
                        bias.values[q_len / 2 * k_len + 1] = f64::NAN;
                        let row = (q_len - 3) * k_len;
                        bias.values[row..row + k_len].fill(f64::NEG_INFINITY);
                        *bias.values.last_mut().expect("an element") = f64::NEG_INFINITY;
                    }
                    case.check_gradients(engine, &inputs, &grads);
                }
            }
        }
    }
}

/// NaN and infinities of each input, which some queries see and others do not, in tiles of both kinds.
fn what_is_not_finite_stays_with_what_sees_it<E: MaskedEngine>(engine: &E) {
    for case in problems::<E>().into_iter().take(2) {
        let [_, q_heads, _, q_len, k_len, _] = case.sizes;
        for mask_heads in [1, q_heads] {
            let mask = [1, mask_heads, q_len, k_len];
            let case = case.clone().mask(mask, Pattern::Window(75));
            let case = case.bias([1, 1, 1, k_len]);
            for (n, bad) in [f64::NAN, f64::INFINITY].into_iter().enumerate() {
                for target in 0..4 {
                    let mut inputs = case.inputs();
                    let mut grads = case.gradients(&inputs);
                    spoil(&mut inputs, &mut grads, target, n, bad);
                    case.check_gradients(engine, &inputs, &grads);
                }
            }
        }
    }
}

/// Biases of −∞ in tiles that the queries see whole: on every third key, and on all, where no row has a logit.
fn infinite_biases_hide_keys<E: MaskedEngine>(engine: &E) {
    for case in half_of_problems::<E>(0) {
        let [_, _, _, q_len, k_len, _] = case.sizes;
        let case = case.mask([1, 1, q_len, k_len], Pattern::Random(1.0));
        let case = case.bias([1, 1, 1, k_len]).causal(false);
        for every in [3, 1] {
            let mut inputs = case.inputs();
            let bias = inputs.bias.as_mut().expect("the case has one");
            let hidden = bias.values.iter_mut().step_by(every);
            hidden.for_each(|x| *x = f64::NEG_INFINITY);
            case.check_inputs(engine, &inputs);
        }
    }
}
