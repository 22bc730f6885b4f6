//! Sequences of a batch are independent, and so are the kv heads with their queries: whatever the others contain, every
//! bit of the results stays the same if sums have a fixed order.

use super::{Change, Results, bits_of, call, masked_results, results};
use flash_dma_tests::prelude::*;

every_engine!(
    sequences_do_not_know_each_other,
    heads_do_not_know_each_other,
    sequences_under_masks_do_not_know_each_other,
    heads_under_masks_do_not_know_each_other,
);

fn problems<E: Engine>(engine: &E) -> Vec<Case> {
    let case = |batch, q_len, k_len, dim, element: ElementType| {
        let case = Case::new(q_len, k_len).dim(dim).element(element);
        let case = case.options(|o| o.with_deterministic(true));
        Case { batch, ..case }
    };
    let cases = E::cases(
        [case(2, 30, 45, 16, F32).heads(2, 2)],
        [
            case(3, 100, 130, 64, Bf16).heads(4, 2),
            case(2, 140, 90, 32, F16).heads(6, 2),
        ],
        [
            case(3, 1000, 1000, 64, F16).heads(4, 2),
            case(2, 3, 1773, 128, Bf16).heads(12, 3).window(728),
        ],
    );
    engine.supported(cases, |case| case.element)
}

/// Part `n` of `parts` equal ones: sequences and heads are the outer axes of every tensor.
fn part<T>(values: &mut [T], n: usize, parts: usize) -> &mut [T] {
    let size = values.len() / parts;
    &mut values[n * size..(n + 1) * size]
}

/// Runs `dirty` for each change, in another part each time, which `out` shows; every other part keeps every bit.
fn stay_apart(
    clean: &Results,
    parts: usize,
    seed: u64,
    what: &str,
    dirty: impl Fn(Change, usize, &mut Rng) -> Results,
) {
    let mut rng = Rng::new(seed);
    for (n, change) in Change::ALL.into_iter().enumerate() {
        let changed = (n + 1) % parts;
        let what = format!("{change:?} in part {changed} of {what}");
        let dirty = dirty(change, changed, &mut rng);
        for ((name, clean), (_, dirty)) in clean.iter().zip(&dirty) {
            let (mut clean, mut dirty) = (bits_of(clean), bits_of(dirty));
            for n in 0..parts {
                let same = part(&mut clean, n, parts) == part(&mut dirty, n, parts);
                if n != changed {
                    assert!(same, "{what}: {name} of part {n} of {parts} is another");
                } else if *name == "out" {
                    assert!(!same, "{what}: the change is none");
                }
            }
        }
    }
}

fn are_apart<E: Engine>(engine: &E, case: &Case, parts: usize) {
    let inputs = case.inputs();
    let grads = Grads::random(&inputs.problem, case.seed);
    let clean = results(engine, &call(engine, &inputs, &grads));
    let what = format!("{case:?}, {}", E::NAME);
    stay_apart(&clean, parts, case.seed, &what, |change, changed, rng| {
        let (mut dirty, mut grads) = (inputs.clone(), grads.clone());
        for values in [&mut dirty.q, &mut dirty.k, &mut dirty.v, &mut grads.out] {
            change.write(part(values, changed, parts), case.element, rng);
        }
        for values in dirty.scores.iter_mut().chain(&mut grads.lse) {
            change.write(part(values, changed, parts), F32, rng);
        }
        results(engine, &call(engine, &dirty, &grads))
    });
}

fn sequences_do_not_know_each_other<E: Engine>(engine: &E) {
    for case in problems(engine) {
        are_apart(engine, &case, case.batch);
        are_apart(engine, &case.clone().plain(), case.batch);
    }
}

/// A kv head and the query heads that read it, of each sequence.
fn heads_do_not_know_each_other<E: Engine>(engine: &E) {
    for case in problems(engine) {
        let parts = case.batch * case.kv_heads;
        are_apart(engine, &case, parts);
        are_apart(engine, &case.plain(), parts);
    }
}

/// With a mask of kv heads and a bias of keys or of pairs.
fn masked_problems<E: MaskedEngine>(engine: &E) -> Vec<MaskedCase> {
    let case = |sizes: [usize; 6], element, pairs| {
        let [batch, q_heads, kv_heads, q_len, k_len, _] = sizes;
        let case = MaskedCase::new(sizes).element(element).causal(true);
        let case = case.mask([batch, kv_heads, q_len, k_len], Pattern::Random(0.5));
        let mut case = match pairs {
            true => case.bias([batch, q_heads, q_len, k_len]),
            false => case.bias([batch, kv_heads, 1, k_len]),
        };
        case.options.deterministic = true;
        case
    };
    let cases = E::cases(
        [case([2, 2, 2, 30, 45, 8], F32, false)],
        [
            case([2, 4, 2, 100, 130, 64], Bf16, false),
            case([2, 4, 2, 70, 90, 64], F16, true),
        ],
        [
            case([3, 4, 2, 300, 330, 128], Bf16, false),
            case([2, 6, 2, 130, 200, 64], Bf16, true),
        ],
    );
    engine.supported(cases, |case| case.element)
}

fn masked_are_apart<E: MaskedEngine>(engine: &E, case: &MaskedCase, parts: usize) {
    let inputs = case.inputs();
    let grads = case.gradients(&inputs);
    let clean = masked_results(engine, case, &inputs, &grads);
    let what = format!("{case:?}, {}", E::NAME);
    stay_apart(&clean, parts, case.seed, &what, |change, changed, rng| {
        let (mut dirty, mut grads) = (inputs.clone(), grads.clone());
        for values in [&mut dirty.q, &mut dirty.k, &mut dirty.v, &mut grads.out] {
            change.write(part(values, changed, parts), case.element, rng);
        }
        let bias = dirty.bias.as_mut().map(|bias| &mut bias.values);
        for values in bias.into_iter().chain(&mut grads.lse) {
            change.write(part(values, changed, parts), F32, rng);
        }
        let mask = dirty.visible.as_mut().expect("the case has one");
        // Two of the changes show all of it.
        let shows = matches!(change, Change::Filled(x) if x < 0.0 || x.is_nan());
        for shown in part(&mut mask.values, changed, parts) {
            *shown = shows || !*shown;
        }
        masked_results(engine, case, &dirty, &grads)
    });
}

fn sequences_under_masks_do_not_know_each_other<E: MaskedEngine>(engine: &E) {
    for case in masked_problems(engine) {
        masked_are_apart(engine, &case, case.sizes[0]);
    }
}

fn heads_under_masks_do_not_know_each_other<E: MaskedEngine>(engine: &E) {
    for case in masked_problems(engine) {
        masked_are_apart(engine, &case, case.sizes[0] * case.sizes[2]);
    }
}
