//! Gradients of biases that differ from query to query.

use super::{groups, half_of_problems, problems};
use flash_dma_tests::prelude::*;

tensor_core_engines!(
    of_biases_of_pairs,
    of_biases_of_queries_alone,
    of_every_broadcast_of_a_bias_of_pairs,
    of_every_broadcast_under_masks,
    of_biases_of_pairs_and_softcaps,
    of_biases_of_pairs_and_softcaps_under_masks,
    of_biases_of_pairs_of_many_keys,
);

/// All ways in which a bias per pair broadcasts over sequences and heads.
fn biases_of_pairs([batch, q_heads, kv_heads, q_len, k_len, _]: [usize; 6]) -> Vec<[usize; 4]> {
    let heads = [1, kv_heads, q_heads];
    let shapes = [1, batch].map(|batch| heads.map(|heads| [batch, heads, q_len, k_len]));
    shapes.into_iter().flatten().collect()
}

/// Biases that differ from query to query, with and without lists of tiles.
fn of_biases_of_pairs<E: MaskedEngine>(engine: &E) {
    for case in half_of_problems::<E>(1) {
        let [batch, q_heads, kv_heads, q_len, k_len, _] = case.sizes;
        let window = Some(([1, 1, q_len, k_len], Pattern::Window(80)));
        let heads = Some(([batch, q_heads, q_len, k_len], Pattern::Random(0.5)));
        for (mask, bias) in [
            (None, [batch, kv_heads, q_len, k_len]),
            (window, [1, q_heads, q_len, k_len]),
            (heads, [batch, 1, q_len, k_len]),
        ] {
            let mut case = case.clone().bias(bias);
            case.mask = mask;
            case.check(engine);
        }
    }
}

/// Biases that are the same for all keys, and one number.
fn of_biases_of_queries_alone<E: MaskedEngine>(engine: &E) {
    for case in problems::<E>().into_iter().take(3) {
        let [_, _, _, q_len, k_len, _] = case.sizes;
        case.clone().bias([1, 1, q_len, 1]).check(engine);
        let case = case.mask([1, 1, q_len, k_len], Pattern::Window(80));
        case.bias([1, 1, 1, 1]).check(engine);
    }
}

fn of_every_broadcast_of_a_bias_of_pairs<E: MaskedEngine>(engine: &E) {
    for case in groups::<E>() {
        for bias in biases_of_pairs(case.sizes) {
            case.clone().bias(bias).check(engine);
        }
    }
}

/// Masks that broadcast differently from the bias, whose tiles are empty, whole and partial.
fn of_every_broadcast_under_masks<E: MaskedEngine>(engine: &E) {
    for case in groups::<E>() {
        let [batch, q_heads, kv_heads, q_len, k_len, _] = case.sizes;
        for (n, bias) in biases_of_pairs(case.sizes).into_iter().enumerate() {
            for (m, (mask, pattern)) in [
                ([1, 1, q_len, k_len], Pattern::Window(60)),
                ([batch, kv_heads, q_len, k_len], Pattern::Tiles(128, 128)),
                ([batch, q_heads, q_len, k_len], Pattern::Random(0.5)),
                ([1, q_heads, 1, k_len], Pattern::Random(0.7)),
                ([batch, kv_heads, q_len, 1], Pattern::Random(0.7)),
                ([batch, 1, q_len, k_len], Pattern::Nothing),
            ]
            .into_iter()
            .enumerate()
            {
                if (n + m) % 2 == 0 {
                    case.clone().bias(bias).mask(mask, pattern).check(engine);
                }
            }
        }
    }
}

fn softcaps<E: MaskedEngine>() -> impl Iterator<Item = MaskedCase> {
    let sizes = E::cases([], [[1, 4, 2, 140, 150, 64]], [[1, 16, 1, 200, 129, 128]]);
    sizes.into_iter().map(|sizes| {
        let mut case = MaskedCase::new(sizes).element(F16);
        case.options.softcap = Some(4.0);
        case
    })
}

fn of_biases_of_pairs_and_softcaps<E: MaskedEngine>(engine: &E) {
    for case in softcaps::<E>() {
        let [_, _, _, q_len, k_len, _] = case.sizes;
        case.bias([1, 1, q_len, k_len]).check(engine);
    }
}

fn of_biases_of_pairs_and_softcaps_under_masks<E: MaskedEngine>(engine: &E) {
    for case in softcaps::<E>() {
        let [_, q_heads, _, q_len, k_len, _] = case.sizes;
        let case = case.mask([1, 1, q_len, k_len], Pattern::Random(0.5));
        case.bias([1, q_heads, q_len, k_len]).check(engine);
    }
}

/// More key tiles than one cube takes.
fn of_biases_of_pairs_of_many_keys<E: MaskedEngine>(engine: &E) {
    for sizes in E::cases([], [], [[1, 16, 16, 17, 8450, 64]]) {
        let [_, heads, _, q_len, k_len, _] = sizes;
        let case = MaskedCase::new(sizes).element(Bf16).causal(true);
        let case = case.bias([1, heads, q_len, k_len]);
        case.check(engine);
        case.mask([1, 1, q_len, k_len], Pattern::Window(300))
            .check(engine);
    }
}
