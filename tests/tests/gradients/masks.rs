//! Gradients under masks and biases per key, which the tensor cores support: lists, whole tiles and partial ones.

use super::{half_of_problems, problems};
use flash_dma_tests::prelude::*;

tensor_core_engines!(
    of_masks_and_key_biases,
    of_groups_and_softcaps,
    of_biases_alone: biases_alone(0),
    of_biases_alone_of_other_problems: biases_alone(1),
    where_heads_see_different_keys,
);

fn of_masks_and_key_biases<E: MaskedEngine>(engine: &E) {
    for case in problems::<E>() {
        let [batch, _, kv_heads, q_len, k_len, _] = case.sizes;
        for (mask, pattern, bias) in [
            (
                [batch, kv_heads, q_len, k_len],
                Pattern::Random(0.5),
                [1, kv_heads],
            ),
            ([1, 1, q_len, k_len], Pattern::Tiles(32, 64), [batch, 1]),
            ([1, 1, q_len, k_len], Pattern::Window(70), [batch, kv_heads]),
            ([1, kv_heads, q_len, k_len], Pattern::Top(9), [1, 1]),
            ([batch, 1, 1, k_len], Pattern::Random(0.7), [1, 1]),
            (
                [1, 1, q_len, k_len],
                Pattern::Random(1.0),
                [batch, kv_heads],
            ),
        ] {
            let bias = [bias[0], bias[1], 1, k_len];
            case.clone().mask(mask, pattern).bias(bias).check(engine);
        }
    }
}

/// Many query heads share a key, or each has its own; a softcap in front of the bias.
fn of_groups_and_softcaps<E: MaskedEngine>(engine: &E) {
    for sizes in E::cases([], [], [[1, 32, 1, 17, 190, 64], [1, 3, 3, 200, 129, 128]]) {
        let [.., q_len, k_len, _] = sizes;
        let mut case = MaskedCase::new(sizes)
            .element(Bf16)
            .mask([1, 1, q_len, k_len], Pattern::Random(0.5))
            .bias([1, 1, 1, k_len]);
        case.options.softcap = Some(4.0);
        case.check(engine);
    }
}

fn biases_alone<E: MaskedEngine>(engine: &E, half: usize) {
    for case in problems::<E>().into_iter().skip(half).step_by(2) {
        let [batch, _, kv_heads, _, k_len, _] = case.sizes;
        case.bias([batch, kv_heads, 1, k_len]).check(engine);
    }
}

/// A mask or a bias for every query head: the heads of a group stream different queries past the same keys.
fn where_heads_see_different_keys<E: MaskedEngine>(engine: &E) {
    for case in half_of_problems::<E>(0) {
        let [batch, q_heads, _, q_len, k_len, _] = case.sizes;
        for (mask, pattern) in [
            ([batch, q_heads, q_len, k_len], Pattern::Random(0.3)),
            ([1, q_heads, q_len, k_len], Pattern::Window(80)),
            ([1, q_heads, 1, k_len], Pattern::Random(0.6)),
            ([1, q_heads, q_len, 1], Pattern::Random(0.6)),
        ] {
            case.clone().mask(mask, pattern).check(engine);
        }
        let bias = case.bias([batch, q_heads, 1, k_len]);
        bias.check(engine);
        let mask = [1, q_heads, q_len, k_len];
        bias.mask(mask, Pattern::Window(80)).check(engine);
    }
}
