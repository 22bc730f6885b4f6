//! Causality under masks and biases: neither future keys and values nor their masks and biases reach a row.

use super::causality::{change, cuts};
use super::{Change, masked_results};
use flash_dma_tests::prelude::*;

every_engine!(
    the_future_of_a_key_bias_changes_no_row,
    the_future_of_a_bias_of_pairs_changes_no_row,
);

fn problems<E: MaskedEngine>(engine: &E) -> Vec<MaskedCase> {
    let case = |sizes, element| MaskedCase::new(sizes).element(element).causal(true);
    let cases = E::cases(
        [case([1, 2, 1, 40, 55, 8], F32)],
        [
            case([1, 4, 2, 130, 200, 64], Bf16),
            case([2, 3, 3, 150, 140, 40], F32),
        ],
        [
            case([1, 4, 2, 333, 700, 128], F16),
            case([2, 6, 2, 640, 640, 64], Bf16),
        ],
    );
    engine.supported(cases, |case| case.element)
}

fn holds<E: MaskedEngine>(engine: &E, case: &MaskedCase) {
    let inputs = case.inputs();
    let p = inputs.problem;
    let grads = case.gradients(&inputs);
    let clean = masked_results(engine, case, &inputs, &grads);
    let expected = case.expected(&inputs, &grads);
    let mut rng = Rng::new(case.seed);
    for (n, future) in Change::ALL.into_iter().enumerate() {
        let cut = cuts(p.q_len, p.k_len)[n % 3];
        let what = format!("{}, {future:?} from {cut} on, {case:?}", E::NAME);
        let (mut dirty, mut grads) = (inputs.clone(), grads.clone());
        let rows = [&mut dirty.q, &mut dirty.k, &mut dirty.v, &mut grads.out];
        let bias = dirty.bias.as_mut().map(|bias| &mut bias.values);
        change(&p, rows.map(|x| &mut x[..]), bias, future, cut, &mut rng);
        if let Some(mask) = &mut dirty.visible {
            // All of the future is shown.
            let rows = mask.values.chunks_mut(p.k_len);
            rows.for_each(|row| row[cut..].fill(true));
        }
        let dirty = masked_results(engine, case, &dirty, &grads);
        let past = |row: usize| p.position(row % p.q_len) < cut as i64;
        for ((name, clean), (_, dirty)) in clean.iter().zip(&dirty).take(3) {
            expected.check_same(name, clean, dirty, past, &what);
        }
        // The change has an effect.
        assert!(clean[0] != dirty[0], "{what}");
    }
}

fn the_future_of_a_key_bias_changes_no_row<E: MaskedEngine>(engine: &E) {
    for case in problems(engine) {
        let [batch, _, kv_heads, q_len, k_len, _] = case.sizes;
        let case = case.bias([batch, kv_heads, 1, k_len]);
        holds(engine, &case);
        let mask = [1, kv_heads, q_len, k_len];
        holds(engine, &case.mask(mask, Pattern::Random(0.5)));
    }
}

fn the_future_of_a_bias_of_pairs_changes_no_row<E: MaskedEngine>(engine: &E) {
    for case in problems(engine) {
        let [_, q_heads, _, q_len, k_len, _] = case.sizes;
        let case = case.bias([1, q_heads, q_len, k_len]);
        holds(engine, &case);
        holds(
            engine,
            &case.mask([1, 1, q_len, k_len], Pattern::Window(70)),
        );
    }
}
