//! Suffixes under masks and biases: a suffix of the queries, with its rows of the mask and of the bias, yields the tail
//! of the whole pass and its gradients.

use super::masked_results;
use super::suffixes::{placed, rows};
use flash_dma_tests::prelude::*;

every_engine!(
    a_suffix_of_queries_is_the_tail_under_a_key_bias,
    a_suffix_of_queries_is_the_tail_under_a_bias_of_pairs,
);

/// Square problems, each with the numbers of its last queries.
fn problems<E: MaskedEngine>(engine: &E) -> Vec<(MaskedCase, Vec<usize>)> {
    let case = |[batch, q_heads, kv_heads, len, dim]: [usize; 5], element| {
        let case = MaskedCase::new([batch, q_heads, kv_heads, len, len, dim]);
        case.element(element).causal(true)
    };
    let (small, medium, large) = (vec![1, 7], vec![3, 130], vec![3, 65]);
    let cases = E::cases(
        [(case([1, 2, 1, 50, 8], F32), small)],
        [(case([2, 4, 2, 200, 64], Bf16), medium)],
        [
            (case([2, 6, 2, 700, 64], F16), large.clone()),
            (case([1, 4, 1, 1100, 128], Bf16), large),
        ],
    );
    engine.supported(cases, |(case, _)| case.element)
}

/// The rows of the last queries of a tensor that broadcasts over pairs.
fn tail_of<T: Copy>(whole: &Broadcast<T>, suffix: usize) -> Broadcast<T> {
    let [batch, heads, queries, keys] = whole.shape;
    if queries == 1 {
        return whole.clone();
    }
    let heads_of = whole.values.chunks(queries * keys);
    Broadcast {
        shape: [batch, heads, suffix, keys],
        values: heads_of
            .flat_map(|head| head[(queries - suffix) * keys..].to_vec())
            .collect(),
    }
}

fn is_the_tail<E: MaskedEngine>(engine: &E, case: &MaskedCase, suffix: usize) {
    let whole = case.inputs();
    let [batch, q_heads, kv_heads, len, _, dim] = case.sizes;
    let queries = len - suffix..len;
    let mut part = case.clone();
    part.sizes = [batch, q_heads, kv_heads, suffix, len, dim];
    let queries_of = |rows: usize| if rows == 1 { 1 } else { suffix };
    part.bias = (case.bias).map(|[b, heads, rows, keys]| [b, heads, queries_of(rows), keys]);
    part.mask = None;
    let tail = MaskedInputs {
        problem: part.inputs().problem,
        q: rows(&whole.q, len, dim, queries.clone()),
        k: whole.k.clone(),
        v: whole.v.clone(),
        visible: whole.visible.as_ref().map(|mask| tail_of(mask, suffix)),
        bias: whole.bias.as_ref().map(|bias| tail_of(bias, suffix)),
    };
    let grads = case.gradients(&tail);
    let expected = part.expected(&tail, &grads);
    let expected = expected.with_yardsticks(part.others(&tail, true));
    let zeros_before = Grads {
        out: placed(&grads.out, len, dim, queries.clone()),
        lse: (grads.lse.as_ref()).map(|lse| placed(lse, len, 1, queries.clone())),
    };
    let tail_results = masked_results(engine, case, &tail, &grads);
    let whole_results = masked_results(engine, case, &whole, &zeros_before);
    for ((name, whole_values), (_, values)) in whole_results.iter().zip(&tail_results) {
        let whole_values = match *name {
            "out" | "dq" => rows(whole_values, len, dim, queries.clone()),
            "lse" => rows(whole_values, len, 1, queries.clone()),
            "dbias" => {
                let bias = whole.bias.as_ref().expect("it has a gradient");
                let gradient = Broadcast {
                    shape: bias.shape,
                    values: whole_values.clone(),
                };
                tail_of(&gradient, suffix).values
            }
            _ => whole_values.clone(),
        };
        let what = format!("{}, the last {suffix} queries of {case:?}", E::NAME);
        expected.check_same(name, &whole_values, values, |_| true, what);
    }
}

fn a_suffix_of_queries_is_the_tail_under_a_key_bias<E: MaskedEngine>(engine: &E) {
    for (case, suffixes) in problems(engine) {
        let [batch, _, kv_heads, len, ..] = case.sizes;
        let case = case.bias([batch, kv_heads, 1, len]);
        for suffix in suffixes {
            is_the_tail(engine, &case, suffix);
            for pattern in [Pattern::Random(0.5), Pattern::Top(len / 3)] {
                let case = case.clone().mask([1, kv_heads, len, len], pattern);
                is_the_tail(engine, &case, suffix);
            }
        }
    }
}

fn a_suffix_of_queries_is_the_tail_under_a_bias_of_pairs<E: MaskedEngine>(engine: &E) {
    for (case, suffixes) in problems(engine) {
        let [_, q_heads, _, len, ..] = case.sizes;
        let case = case.bias([1, q_heads, len, len]);
        for suffix in suffixes {
            is_the_tail(engine, &case, suffix);
            let mask = [1, 1, len, len];
            is_the_tail(
                engine,
                &case.clone().mask(mask, Pattern::Window(70)),
                suffix,
            );
        }
    }
}
