//! The gradient of kept keys: what the loss would lose without them, beside that of runners-up.

use super::runners_up::{
    self, Runners, assert_all_but_scores_same, assert_same, case, check_rank, incoming, run, wide,
};
use flash_dma_problem::AlibiSlopes;
use flash_dma_problem::ElementType::{Bf16, F16, F32};
use flash_dma_problem::LeaveOneOut;
use flash_dma_reference::Inputs;
use flash_dma_reference::compare::sum;
use flash_dma_reference::generate::Scores;
use flash_dma_tests::Layout::{Padded, Transposed};
use flash_dma_tests::engine::skip;
use flash_dma_tests::{Call, Case, Engine, Gradients, every_engine};

/// The first position at which its rank keeps each key: its own, a few later as with recent keys, or none as of sinks.
fn from(inputs: &Inputs) -> Vec<u32> {
    let p = &inputs.problem;
    let keys = (0..p.batch * p.kv_heads).flat_map(|_| 0..p.k_len);
    keys.map(|key| match key % 7 {
        0..=3 => key,
        4 | 5 => key + 9,
        _ => p.k_len,
    } as u32)
        .collect()
}

fn call<E: Engine>(engine: &E, runners: &Runners, inputs: &Inputs, how: LeaveOneOut) -> Call {
    let mut call = runners_up::call(engine, runners, inputs);
    call.left_out = Some((from(inputs), how));
    call
}

fn check<E: Engine>(engine: &E, runners: &Runners, how: LeaveOneOut) {
    let (case, more) = runners;
    check_rank(
        engine,
        case,
        format!("{} at {case:?}, {more} runners-up, {how:?}", E::NAME),
        |inputs| call(engine, runners, inputs, how),
        |inputs, grad_out, grad_lse| {
            let from = from(inputs);
            let kept = (&from[..], how);
            let of_next = (
                inputs.rank_gradient(*more, grad_out, grad_lse),
                inputs.naive_rank_gradient(*more, grad_out, grad_lse),
            );
            let of_kept = (
                inputs.left_out_gradient(kept, grad_out, grad_lse),
                inputs.naive_left_out_gradient(kept, grad_out, grad_lse),
            );
            sum(of_next, &of_kept)
        },
    );
}

/// Checks the cases of a host up to its size, or those of a device.
fn check_all<E: Engine>(
    engine: &E,
    small: impl IntoIterator<Item = Runners>,
    medium: impl IntoIterator<Item = Runners>,
    device: impl IntoIterator<Item = Runners>,
) {
    for runners in E::cases_or_device(small, medium, device) {
        check(engine, &runners, LeaveOneOut::default());
    }
}

fn of_every_length_and_window<E: Engine>(engine: &E) {
    let medium = [
        (case(239, 113, 40), 10),
        (case(113, 239, 40), 0),
        (case(1, 257, 64), 16),
        (case(300, 300, 1), 5),
        // Nobody misses the window.
        (case(100, 100, 100), 20),
        (case(1040, 1300, 90), 20),
    ];
    let device = [
        (wide(700, 900, 100), 40),
        (wide(900, 700, 100), 0),
        (wide(1, 2000, 300), 75),
        (wide(300, 300, 1), 1),
        (wide(100, 100, 100), 20),
    ];
    check_all(engine, [(case(40, 40, 6), 3)], medium, device);
}

/// Ties, −∞ (of all keys: rows whose LSE is −∞), NaN.
fn of_every_kind_of_scores<E: Engine>(engine: &E) {
    let kinds = |of: fn(usize, usize, usize) -> Case| {
        Scores::ALL.map(|kind| (of(150, 150, 20).scores(kind), 9))
    };
    let small = Scores::ALL.map(|kind| (case(31, 31, 4).scores(kind), 5));
    check_all(engine, small, kinds(case), kinds(wide));
}

fn of_groups<E: Engine>(engine: &E) {
    let groups = |of: fn(usize, usize, usize) -> Case| {
        [(4, 4), (4, 1), (6, 2)].map(|(q, kv)| (of(257, 300, 64).heads(q, kv), 16))
    };
    check_all(engine, [], groups(case), groups(wide));
}

fn of_head_dims<E: Engine>(engine: &E) {
    let of = |len, window, (dim, element)| case(len, len, window).dim(dim).element(element);
    let dims = [(24, F32), (64, F16), (96, Bf16), (128, Bf16), (256, Bf16)];
    let medium = dims.map(|dim| (of(150, 32, dim), 8));
    let device = dims.map(|dim| (of(700, 90, dim).heads(4, 2), 25));
    check_all(engine, [], medium, device);
}

fn of_softcaps_scales_and_alibi<E: Engine>(engine: &E) {
    let both = |case: Case| {
        let capped = (case.clone()).options(|o| o.with_softcap(3.0).with_scale(0.7));
        let slopes = AlibiSlopes::standard(case.q_heads);
        let near = case.clone().options(|o| o.with_alibi(slopes));
        [(capped, 16), (near, 16), (case.deviation(30.0), 16)]
    };
    let device = both(wide(700, 700, 100).dim(128));
    check_all(engine, [], both(case(257, 257, 64)), device);
}

/// Without causal masking.
fn of_one_position<E: Engine>(engine: &E) {
    let medium = [(case(150, 257, 64).full(), 500)];
    let device = [
        (wide(1, 900, 64).full(), 16),
        (wide(700, 700, 100).full(), 40),
    ];
    check_all(engine, [(case(9, 40, 6).full(), 7)], medium, device);
}

/// Over several chunks of queries.
fn of_long_rows<E: Engine>(engine: &E) {
    let long = |q_len, k_len, window| {
        let mut case = wide(q_len, k_len, window);
        case.batch = 1;
        case
    };
    let device = [
        (long(2300, 2500, 512), 128),
        (long(2500, 2300, 40), 600),
        (long(2100, 900, 64).full(), 300),
        (
            long(2300, 2500, 512).options(|o| o.with_deterministic(true)),
            128,
        ),
    ];
    check_all(engine, [], [], device);
}

fn of_out_alone<E: Engine>(engine: &E) {
    let out_alone = |mut case: Case| {
        case.grad_lse = false;
        case
    };
    let device = [(out_alone(wide(700, 700, 100).heads(4, 1)), 50)];
    let medium = [(out_alone(case(250, 250, 40)), 10)];
    check_all(engine, [(out_alone(case(40, 40, 6)), 3)], medium, device);
}

/// From where a key that has all of a row's weight counts for much to where it counts for little.
fn of_every_weight_besides<E: Engine>(engine: &E) {
    let cases = E::cases_or_device(
        [(case(40, 40, 6), 3)],
        [(case(250, 250, 40), 10)],
        [(wide(700, 700, 100), 25)],
    );
    for runners in cases {
        for besides in [1e-2, 0.3, 10.0] {
            check(engine, &runners, LeaveOneOut::new(besides).expect("enough"));
        }
    }
}

/// What an LSE has from a key of little weight is much smaller than 1, to which its logarithm must not round it.
fn of_little_weight_beside_much<E: Engine>(engine: &E) {
    let of = |k_len, window| case(3, k_len, window).full().deviation(0.1);
    let cases = E::cases_or_device(
        [(of(200, 150), 0)],
        [(of(1191, 894), 1)],
        [
            (of(1191, 894), 1),
            (wide(3, 1191, 894).full().deviation(0.1), 1),
        ],
    );
    for runners in cases {
        check(engine, &runners, LeaveOneOut::new(10.0).expect("enough"));
    }
}

fn of_padded_rows_and_transposed_heads<E: Engine>(engine: &E) {
    let layouts = |case: Case, more| [Padded, Transposed].map(|l| (case.clone().layout(l), more));
    let medium = layouts(case(130, 150, 20).heads(4, 2), 5);
    let device = layouts(wide(600, 600, 100).heads(4, 2), 30);
    check_all(engine, [], medium, device);
}

/// With a fixed order everything else keeps its bits, and the gradient itself, too, call after call.
fn nothing_else_changes<E: Engine>(engine: &E) {
    let of = |len, window, dim, element| {
        let case = case(len, len, window).dim(dim).element(element);
        case.options(|o| o.with_deterministic(true))
    };
    let cases = E::cases_or_device(
        [(of(40, 6, 32, F32), 3)],
        [(of(300, 40, 32, F32), 10), (of(300, 40, 64, Bf16), 10)],
        [
            (of(3000, 300, 32, F32).heads(4, 1), 75),
            (of(3000, 300, 64, Bf16).heads(4, 1), 75),
        ],
    );
    for runners in cases {
        let case = &runners.0;
        if !engine.supports(case.element) {
            skip::<E>(&format!("{}", case.element));
            continue;
        }
        let call = call(engine, &runners, &case.inputs(), LeaveOneOut::default());
        let [with, again] = [(); 2].map(|()| run(engine, &call));
        let plain = Call {
            left_out: None,
            ..call
        };
        let without = run(engine, &plain);
        let what = format!("{} at {case:?}", E::NAME);
        for other in [&again, &without] {
            assert_all_but_scores_same(&with, other, &what);
        }
        let rank = |grads: Gradients| grads.rank.or(grads.scores).expect("a gradient");
        let [with, again, without] = [with, again, without].map(|(_, grads)| rank(grads));
        assert_same(&with, &again, "the rank", &what);
        let mut pairs = with.iter().zip(&without);
        let differ = pairs.any(|(a, b)| a.to_bits() != b.to_bits());
        assert!(differ, "the rank on {what}");
    }
}

/// A NaN in the values of a kept key reaches the rows that keep it, and no rank of keys that none of these keep.
fn a_nan_stays_with_its_rows<E: Engine>(engine: &E) {
    let small = case(40, 40, 4).scores(Scores::Decreasing);
    let large = wide(700, 700, 40).scores(Scores::Decreasing);
    for runners in E::cases_or_device([(small.clone(), 0)], [(small, 0)], [(large, 0)]) {
        let case = &runners.0;
        if !engine.supports(case.element) {
            skip::<E>(&format!("{}", case.element));
            continue;
        }
        let mut inputs = case.inputs();
        // The first keys of each head are kept by all later rows, this one by none but its own.
        let key = inputs.problem.window + 2;
        inputs.v[key * case.head_dim] = f64::NAN;
        let call = call(engine, &runners, &inputs, LeaveOneOut::default());
        let (_, grads) = run(engine, &call);
        let (grad_out, grad_lse) = incoming(case, &inputs);
        let from = from(&inputs);
        let kept = (&from[..], LeaveOneOut::default());
        let exact = inputs.left_out_gradient(kept, &grad_out, grad_lse.as_deref());
        let Some(rank) = grads.rank else { continue };
        for (n, (rank, exact)) in rank.iter().zip(&exact.values).enumerate() {
            assert_eq!(rank.is_nan(), exact.is_nan(), "{}: key {n}", E::NAME);
        }
    }
}

every_engine!(
    of_every_length_and_window,
    of_every_kind_of_scores,
    of_groups,
    of_head_dims,
    of_softcaps_scales_and_alibi,
    of_one_position,
    of_long_rows,
    of_out_alone,
    of_every_weight_besides,
    of_little_weight_beside_much,
    of_padded_rows_and_transposed_heads,
    nothing_else_changes,
    a_nan_stays_with_its_rows,
);
