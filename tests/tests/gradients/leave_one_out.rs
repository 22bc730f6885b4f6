//! The gradient of kept keys, by leaving each out, together with that of runners-up.

use super::runners_up::{
    Runners, alibi, assert_all_but_scores_same, assert_same, call, case, check_all, from, groups,
    in_fixed_order, kinds, long_rows, of_each_option, of_rank, one_position, out_alone, run, wide,
};
use flash_dma_tests::Layout::{Padded, Transposed};
use flash_dma_tests::prelude::*;

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
    check_all(engine, true, [(case(40, 40, 6), 3)], medium, device);
}

fn of_head_dims<E: Engine>(engine: &E) {
    let of = |len, window, (dim, element)| case(len, len, window).dim(dim).element(element);
    let dims = [(24, F32), (64, F16), (96, Bf16), (128, Bf16), (256, Bf16)];
    let medium = dims.map(|dim| (of(150, 32, dim), 8));
    let device = dims.map(|dim| (of(700, 90, dim).heads(4, 2), 25));
    check_all(engine, true, [], medium, device);
}

fn of_softcaps_scales_and_alibi<E: Engine>(engine: &E) {
    let medium = of_each_option(case(257, 257, 64));
    let device = of_each_option(wide(700, 700, 100).dim(128));
    check_all(engine, true, [], medium, device);
}

/// A key of little weight adds much less than 1 to the LSE, which its logarithm must not round away. The values are
/// small, too: next to the rounding of a greater output the rounding of the LSE would not show.
fn of_little_weight_beside_much<E: Engine>(engine: &E) {
    let long = |case: Case, more| (case.full().deviation(0.001), more);
    let small = [long(case(3, 2000, 1500), 0)];
    let medium = [long(case(3, 12_000, 9000), 1)];
    let device = [
        long(case(3, 12_000, 9000), 1),
        long(wide(3, 12_000, 9000), 1),
    ];
    check_all(engine, true, small, medium, device);
}

fn of_padded_rows_and_transposed_heads<E: Engine>(engine: &E) {
    let layouts = |case: Case, more| [Padded, Transposed].map(|l| (case.clone().layout(l), more));
    let medium = layouts(case(130, 150, 20).heads(4, 2), 5);
    let device = layouts(wide(600, 600, 100).heads(4, 2), 30);
    check_all(engine, true, [], medium, device);
}

/// With a fixed order everything else keeps its bits, and the gradient itself, too, call after call.
fn nothing_else_changes<E: Engine>(engine: &E) {
    for runners in in_fixed_order(engine) {
        let case = &runners.0;
        let call = call(engine, &runners, &case.inputs(), true);
        let [with, again] = [(); 2].map(|()| run(engine, &call));
        let plain = Call {
            kept_from: None,
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
    let cases = E::cases_or_device([(small.clone(), 0)], [(small, 0)], [(large, 0)]);
    for runners in engine.supported(cases, |(case, _)| case.element) {
        let case = &runners.0;
        let mut inputs = case.inputs();
        // The first keys of each head are kept by all later rows, this one only by its own.
        let key = inputs.problem.window + 2;
        inputs.v[key * case.head_dim] = f64::NAN;
        let call = call(engine, &runners, &inputs, true);
        let (_, grads) = run(engine, &call);
        let incoming = case.gradients(&inputs);
        let (grad_out, grad_lse) = incoming.parts();
        let from = from(&inputs);
        let exact = inputs.left_out_gradient(&from, grad_out, grad_lse);
        let Some(rank) = grads.rank else { continue };
        for (n, (rank, exact)) in rank.iter().zip(&exact.values).enumerate() {
            assert_eq!(rank.is_nan(), exact.is_nan(), "{}: key {n}", E::NAME);
        }
    }
}

/// Scores that are constant, and no gradient of the LSE, as where scores only rank: what kept keys learn may be summed with
/// the gradients of keys and values.
fn of_constant_scores<E: Engine>(engine: &E) {
    let medium = [
        (case(239, 113, 40), 10),
        (case(250, 250, 40).heads(4, 1), 0),
        (case(150, 150, 20).scores(Scores::Ties), 9),
        (case(150, 257, 64).full(), 30),
    ];
    let device = [
        (wide(700, 900, 100), 40),
        (
            case(700, 900, 100).options(|o| o.with_deterministic(true)),
            40,
        ),
    ];
    let cases = E::cases_or_device([(case(40, 40, 6), 3)], medium, device);
    cases
        .into_iter()
        .for_each(|case| with_constant_scores(engine, case));
}

/// The same of every option, on tensor cores of which the dk/dv kernel sums it.
fn of_constant_scores_and_options<T: Target>(kernels: &Kernels<T>) {
    let of = |dim, element| wide(700, 700, 90).dim(dim).element(element).heads(4, 2);
    let capped = |case: Case| case.options(|o| o.with_softcap(3.0).with_scale(0.7));
    let cases = [
        (wide(900, 700, 100), 0),
        (wide(300, 300, 1), 1),
        (wide(100, 100, 100), 20),
        (wide(700, 700, 100).full(), 40),
        (wide(700, 700, 100).heads(4, 1), 50),
        (of(128, Bf16), 25),
        (of(128, Bf16).deviation(30.0), 25),
        (capped(of(128, F16)), 25),
        (alibi(of(128, Bf16)), 25),
        // Several chunks of queries, to whose keys some cubes add.
        (wide(2300, 2500, 512), 128),
        (wide(2500, 2300, 40).heads(4, 1), 600),
        (
            wide(2300, 2500, 512).options(|o| o.with_deterministic(true)),
            128,
        ),
    ];
    let kinds = Scores::ALL.map(|kind| (wide(150, 150, 20).scores(kind), 9));
    let device = cases.into_iter().chain(kinds);
    for case in Kernels::<T>::cases([], [], device) {
        with_constant_scores(kernels, case);
    }
}

fn with_constant_scores<E: Engine>(engine: &E, (case, more): Runners) {
    if engine.lacks(case.element) {
        return;
    }
    let case = Case {
        grad_lse: false,
        ..case
    };
    let inputs = case.inputs();
    let mut call = call(engine, &(case.clone(), more), &inputs, true);
    call.problem = call.problem.with_constant_scores();
    let (_, grads) = run(engine, &call);
    let what = format!("{} at {case:?}, {more} runners-up", E::NAME);
    let incoming = case.gradients(&inputs);
    let (grad_out, grad_lse) = incoming.parts();
    let (p, exact) = (&inputs.problem, inputs.backward(grad_out, grad_lse));
    let mut wanted = Expected::new(p, inputs.forward(), &inputs.naive_forward());
    let rows = [exact.q, exact.k, exact.v];
    wanted.qkv(p, rows, &inputs.naive_backward(grad_out, grad_lse));
    wanted.gradient(
        "rank",
        &p.scores_shape(),
        of_rank(&inputs, more, &incoming, true),
    );
    // One tensor for scores and rank gets what the rank learns.
    let rank = grads.rank.or(grads.scores).expect("a rank learns");
    for (name, actual) in [
        ("dq", &grads.q),
        ("dk", &grads.k),
        ("dv", &grads.v),
        ("rank", &rank),
    ] {
        wanted.check_one(name, actual, &what);
    }
}

kernel_runtimes!(of_constant_scores_and_options);

every_engine!(
    of_constant_scores,
    of_every_length_and_window,
    of_every_kind_of_scores: kinds(&[9], true),
    of_groups: groups(&[(4, 4), (4, 1), (6, 2)], ([257, 300, 64], 16), true),
    of_head_dims,
    of_softcaps_scales_and_alibi,
    of_one_position: one_position(true),
    of_long_rows: long_rows(true),
    of_out_alone: out_alone(true),
    of_little_weight_beside_much,
    of_padded_rows_and_transposed_heads,
    nothing_else_changes,
    a_nan_stays_with_its_rows,
);
