//! Gradients under masks and biases that the tensor cores serve: lists of tiles, whole tiles and partial ones, and what
//! is not finite in them.

use flash_dma_problem::ElementType::{Bf16, F16};
use flash_dma_reference::masked::MaskedInputs;
use flash_dma_tests::masked::{MaskedCase, MaskedEngine, Pattern};
use flash_dma_tests::tensor_core_engines;

tensor_core_engines!(
    gradients_of_masks_and_key_biases,
    gradients_of_groups_and_softcaps,
    gradients_of_biases_alone,
    gradients_where_heads_see_different_keys,
    gradients_of_biases_of_pairs,
    gradients_of_biases_of_queries_alone,
    gradients_of_every_broadcast_of_a_bias_of_pairs,
    gradients_of_every_broadcast_under_masks,
    gradients_of_biases_of_pairs_and_softcaps,
    gradients_of_biases_of_pairs_of_many_keys,
    what_is_not_finite_stays_with_its_pairs,
    gradients_of_rows_that_see_nothing,
    what_is_not_finite_stays_with_what_sees_it,
    infinite_biases_hide_keys,
);

/// Lengths off every tile, fewer than a tile and several of both passes, with the option of causal masking: each problem
/// is one variant of the kernels, which take longer to compile than to run.
fn problems<E: MaskedEngine>() -> Vec<MaskedCase> {
    let sizes = E::cases(
        [[1, 2, 1, 33, 100, 64]],
        [[1, 4, 1, 150, 200, 64], [2, 2, 2, 100, 130, 128]],
        [
            [1, 4, 2, 129, 200, 128],
            [1, 8, 1, 333, 330, 64],
            [2, 6, 2, 70, 257, 128],
        ],
    );
    let case = |(n, sizes): (usize, [usize; 6])| {
        let case = MaskedCase::new(sizes).element([Bf16, F16][n % 2]);
        case.causal(n != 1)
    };
    sizes.into_iter().enumerate().map(case).collect()
}

fn gradients_of_masks_and_key_biases<E: MaskedEngine>(engine: &E) {
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
fn gradients_of_groups_and_softcaps<E: MaskedEngine>(engine: &E) {
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

fn gradients_of_biases_alone<E: MaskedEngine>(engine: &E) {
    for case in problems::<E>() {
        let [batch, _, kv_heads, _, k_len, _] = case.sizes;
        case.bias([batch, kv_heads, 1, k_len]).check(engine);
    }
}

/// A mask or a bias for every query head: the heads of a group stream different queries past the same keys.
fn gradients_where_heads_see_different_keys<E: MaskedEngine>(engine: &E) {
    for case in problems::<E>() {
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

/// Biases that differ from query to query, with and without lists of tiles.
fn gradients_of_biases_of_pairs<E: MaskedEngine>(engine: &E) {
    for case in problems::<E>() {
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
fn gradients_of_biases_of_queries_alone<E: MaskedEngine>(engine: &E) {
    for case in problems::<E>().into_iter().take(3) {
        let [_, _, _, q_len, k_len, _] = case.sizes;
        case.clone().bias([1, 1, q_len, 1]).check(engine);
        let case = case.mask([1, 1, q_len, k_len], Pattern::Window(80));
        case.bias([1, 1, 1, 1]).check(engine);
    }
}

/// Each way a bias of pairs broadcasts over sequences and heads.
fn biases_of_pairs([batch, q_heads, kv_heads, q_len, k_len, _]: [usize; 6]) -> Vec<[usize; 4]> {
    let heads = [1, kv_heads, q_heads];
    let shapes = [1, batch].map(|batch| heads.map(|heads| [batch, heads, q_len, k_len]));
    shapes.into_iter().flatten().collect()
}

/// Groups of heads, several tiles of queries and of keys, lengths off every tile, more queries than keys.
fn groups<E: MaskedEngine>() -> Vec<MaskedCase> {
    let sizes = E::cases(
        [[2, 4, 2, 20, 30, 64]],
        [[2, 4, 2, 150, 200, 64]],
        [[2, 4, 2, 301, 270, 64], [2, 3, 3, 130, 517, 64]],
    );
    let case = |sizes| MaskedCase::new(sizes).element(Bf16).causal(true);
    sizes.into_iter().map(case).collect()
}

fn gradients_of_every_broadcast_of_a_bias_of_pairs<E: MaskedEngine>(engine: &E) {
    for case in groups::<E>() {
        for bias in biases_of_pairs(case.sizes) {
            case.clone().bias(bias).check(engine);
        }
    }
}

/// Masks that broadcast as the bias does not, whose tiles are empty, whole and partial.
fn gradients_of_every_broadcast_under_masks<E: MaskedEngine>(engine: &E) {
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

fn gradients_of_biases_of_pairs_and_softcaps<E: MaskedEngine>(engine: &E) {
    for (n, sizes) in E::cases([], [[1, 4, 2, 140, 150, 64]], [[1, 16, 1, 200, 129, 128]])
        .into_iter()
        .enumerate()
    {
        let [_, q_heads, _, q_len, k_len, _] = sizes;
        let mut case = MaskedCase::new(sizes).element([F16, Bf16][n % 2]);
        case.options.softcap = Some(4.0);
        case.clone().bias([1, 1, q_len, k_len]).check(engine);
        let case = case.mask([1, 1, q_len, k_len], Pattern::Random(0.5));
        case.bias([1, q_heads, q_len, k_len]).check(engine);
    }
}

/// More key tiles than a cube has for itself.
fn gradients_of_biases_of_pairs_of_many_keys<E: MaskedEngine>(engine: &E) {
    for sizes in E::cases([], [], [[1, 16, 16, 17, 8450, 64]]) {
        let [_, heads, _, q_len, k_len, _] = sizes;
        let case = MaskedCase::new(sizes).element(Bf16).causal(true);
        let case = case.bias([1, heads, q_len, k_len]);
        case.check(engine);
        case.mask([1, 1, q_len, k_len], Pattern::Window(300))
            .check(engine);
    }
}

/// Puts `bad` into k, v, q or the gradient of `out`, by `target`, at the `n`-th place in the middle.
fn spoil(
    case: &MaskedCase,
    inputs: &mut MaskedInputs,
    grad_out: &mut [f64],
    target: usize,
    n: usize,
    bad: f64,
) {
    let [_, _, _, q_len, k_len, dim] = case.sizes;
    let (key, query) = ((k_len / 2 + 5 * n) * dim, (q_len / 2 + n) * dim);
    match target {
        0 => inputs.k[key..key + 3].fill(bad),
        1 => inputs.v[key..key + dim].fill(bad),
        2 => inputs.q[query..query + dim].fill(bad),
        _ => grad_out[query + 2..query + 9].fill(bad),
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
                    let (mut grad_out, grad_lse) = case.gradients(&inputs);
                    if target < 4 {
                        spoil(&case, &mut inputs, &mut grad_out, target, n, bad);
                    } else {
                        let bias = inputs.bias.as_mut().expect("the case has one");
                        bias.values[q_len / 2 * k_len + 1] = f64::NAN;
                        let row = (q_len - 3) * k_len;
                        bias.values[row..row + k_len].fill(f64::NEG_INFINITY);
                        *bias.values.last_mut().expect("an element") = f64::NEG_INFINITY;
                    }
                    case.check_gradients(engine, &inputs, &grad_out, grad_lse.as_deref());
                }
            }
        }
    }
}

/// Zeros, not NaN, beside rows that see keys, in the same tile and in others.
fn gradients_of_rows_that_see_nothing<E: MaskedEngine>(engine: &E) {
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
            let (mut grad_out, grad_lse) = case.gradients(&inputs);
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
                grad_out[i * dim..(i + 1) * dim].fill(bad);
            }
            case.check_gradients(engine, &inputs, &grad_out, grad_lse.as_deref());
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
                    let (mut grad_out, grad_lse) = case.gradients(&inputs);
                    spoil(&case, &mut inputs, &mut grad_out, target, n, bad);
                    case.check_gradients(engine, &inputs, &grad_out, grad_lse.as_deref());
                }
            }
        }
    }
}

/// Biases of −∞ in tiles that the queries see whole: on every third key, and on all, where no row has a logit.
fn infinite_biases_hide_keys<E: MaskedEngine>(engine: &E) {
    for case in problems::<E>() {
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
