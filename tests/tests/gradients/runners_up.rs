//! The gradient of runners-up: keys outside of the window, which learn the change of the loss if they were attended to.

use flash_dma_reference::compare::sum;
use flash_dma_reference::select;
use flash_dma_tests::Layout::{self, Padded, Transposed};
use flash_dma_tests::expected::Both;
use flash_dma_tests::prelude::*;

/// A case and how many runners-up each query has.
pub(super) type Runners = (Case, usize);

/// The first position at which each key is kept for its rank: its own, later as with recent keys, or none as for sinks.
pub(super) fn from(inputs: &Inputs) -> Vec<u32> {
    let p = &inputs.problem;
    let from = |key: usize| match key % 7 {
        0..=3 => key,
        4 | 5 => key + 9,
        _ => p.k_len,
    };
    let keys = (0..p.batch * p.kv_heads).flat_map(|_| 0..p.k_len);
    keys.map(|key| from(key) as u32).collect()
}

/// The call with runners-up, whose ends are those of a window that keeps more keys, and with the kept keys that learn.
pub(super) fn call<E: Engine>(
    engine: &E,
    (case, more): &Runners,
    inputs: &Inputs,
    left_out: bool,
) -> Call {
    let mut call = engine.call(inputs, case.layout, &case.gradients(inputs));
    let scores = call.scores.as_ref().expect("runners-up have scores");
    let wider = engine.select(scores, inputs.problem.window.saturating_add(*more));
    call.runner_up_ends = Some(wider.expect("select").iter().map(|i| i.end).collect());
    call.kept_from = left_out.then(|| from(inputs));
    call
}

pub(super) fn run<E: Engine>(engine: &E, call: &Call) -> (Outputs, Gradients) {
    let result = engine.backward(call);
    result.unwrap_or_else(|refused| panic!("{} refuses: {}", E::NAME, refused.error))
}

/// The gradient of the rank by definition, and by the naive implementation: the sum over queries and runners-up, and over
/// kept keys if they learn.
pub(super) fn of_rank(inputs: &Inputs, more: usize, grads: &Grads, left_out: bool) -> Both {
    let (grad_out, grad_lse) = grads.parts();
    let rank = (
        inputs.rank_gradient(more, grad_out, grad_lse),
        inputs.naive_rank_gradient(more, grad_out, grad_lse),
    );
    if !left_out {
        return rank;
    }
    let from = from(inputs);
    let of_kept = (
        inputs.left_out_gradient(&from, grad_out, grad_lse),
        inputs.naive_left_out_gradient(&from, grad_out, grad_lse),
    );
    sum(rank, &of_kept)
}

/// Compares the gradient of the rank with the oracle's sum over queries and runners-up, and kept keys if they learn; if
/// the scores are both rank and bias, the sum of both gradients with the sum of both.
fn check<E: Engine>(engine: &E, runners: &Runners, left_out: bool) {
    let (case, more) = runners;
    if engine.lacks(case.element) {
        return;
    }
    let what = format!("{} at {case:?}, {more} runners-up, {left_out}", E::NAME);
    let inputs = case.inputs();
    let (_, grads) = run(engine, &call(engine, runners, &inputs, left_out));
    let incoming = case.gradients(&inputs);
    let (grad_out, grad_lse) = incoming.parts();
    let bias = inputs.backward(grad_out, grad_lse).scores;
    let naive_bias = inputs.naive_backward(grad_out, grad_lse).scores;
    let bias = bias.zip(naive_bias).expect("there are scores");
    let rank = of_rank(&inputs, *more, &incoming, left_out);
    let (p, scores) = (&inputs.problem, grads.scores.expect("there are scores"));
    let mut wanted = Expected::new(p, inputs.forward(), &inputs.naive_forward());
    let shape = p.scores_shape();
    if let Some(of_rank) = grads.rank {
        wanted.gradient("dscores", &shape, bias);
        wanted.gradient("rank", &shape, rank);
        wanted.check_one("dscores", &scores, &what);
        return wanted.check_one("rank", &of_rank, &what);
    }
    wanted.gradient("both", &shape, sum(bias, &rank));
    wanted.check_one("both", &scores, &what);
}

pub(super) fn case(q_len: usize, k_len: usize, window: usize) -> Case {
    Case::new(q_len, k_len).window(window)
}

pub(super) fn wide(q_len: usize, k_len: usize, window: usize) -> Case {
    case(q_len, k_len, window).dim(64).element(Bf16)
}

/// Checks the cases of a host up to its size, or those of a device.
pub(super) fn check_all<E: Engine>(
    engine: &E,
    left_out: bool,
    small: impl IntoIterator<Item = Runners>,
    medium: impl IntoIterator<Item = Runners>,
    device: impl IntoIterator<Item = Runners>,
) {
    for runners in E::cases_or_device(small, medium, device) {
        check(engine, &runners, left_out);
    }
}

fn of_every_length<E: Engine>(engine: &E) {
    let small = [(case(40, 40, 6), 3)];
    let medium = [
        (case(239, 113, 40), 10),
        (case(113, 239, 40), 10),
        (case(1, 257, 64), 16),
        (case(1040, 1300, 90), 20),
    ];
    let device = [
        (wide(700, 900, 100), 40),
        (wide(900, 700, 100), 30),
        (wide(1, 2000, 300), 75),
    ];
    check_all(engine, false, small, medium, device);
}

/// Windows of one key and of all keys, fewer runners-up than positions and more than keys.
fn of_every_window<E: Engine>(engine: &E) {
    let windows = |of: fn(usize, usize, usize) -> Case| {
        [
            (of(300, 300, 1), 1),
            (of(300, 300, 1), 1000),
            // Nobody misses the window.
            (of(100, 100, 100), 20),
            (of(100, 100, 60), 0),
            (of(260, 260, 90), 300),
        ]
    };
    let small = [(case(24, 24, 1), 30)];
    check_all(engine, false, small, windows(case), windows(wide));
}

/// Ties, −∞ (of all keys: rows whose LSE is −∞), NaN, with each number of runners-up.
pub(super) fn kinds<E: Engine>(engine: &E, runners_up: &[usize], left_out: bool) {
    let kinds = |of: fn(usize, usize, usize) -> Case| {
        let case = move |kind| of(150, 150, 20).scores(kind);
        let each = move |kind| runners_up.iter().map(move |&more| (case(kind), more));
        Scores::ALL.into_iter().flat_map(each)
    };
    let small = Scores::ALL.map(|kind| (case(31, 31, 4).scores(kind), 5));
    check_all(engine, left_out, small, kinds(case), kinds(wide));
}

/// Query and kv heads, of a case of these sizes.
pub(super) fn groups<E: Engine>(
    engine: &E,
    heads: &[(usize, usize)],
    ([q_len, k_len, window], more): ([usize; 3], usize),
    left_out: bool,
) {
    let groups = |of: fn(usize, usize, usize) -> Case| {
        let each = move |&(q, kv): &_| (of(q_len, k_len, window).heads(q, kv), more);
        heads.iter().map(each)
    };
    check_all(engine, left_out, [], groups(case), groups(wide));
}

fn head_dims<E: Engine>(engine: &E, dims: [usize; 2], element: ElementType) {
    let of = |len, window, dim| case(len, len, window).dim(dim).element(element);
    let medium = dims.map(|dim| (of(150, 32, dim), 8));
    let device = dims.map(|dim| (of(700, 90, dim).heads(4, 2), 25));
    check_all(engine, false, [(of(40, 6, 32), 3)], medium, device);
}

pub(super) fn alibi(case: Case) -> Case {
    let slopes = AlibiSlopes::standard(case.q_heads);
    case.options(|o| o.with_alibi(slopes))
}

/// A softcap and a scale, ALiBi, and great logits.
pub(super) fn of_each_option(case: Case) -> [Runners; 3] {
    let capped = (case.clone()).options(|o| o.with_softcap(3.0).with_scale(0.7));
    let near = alibi(case.clone());
    [(capped, 16), (near, 16), (case.deviation(30.0), 16)]
}

fn of_softcaps_scales_and_alibi<E: Engine>(engine: &E) {
    let small = [(alibi(case(23, 40, 6).options(|o| o.with_softcap(1.5))), 3)];
    let medium = of_each_option(case(257, 257, 64));
    let device = of_each_option(wide(700, 700, 100).dim(128));
    check_all(engine, false, small, medium, device);
}

/// Without causal masking.
pub(super) fn one_position<E: Engine>(engine: &E, left_out: bool) {
    let medium = [
        (case(1, 257, 64).full(), 16),
        (case(150, 257, 64).full(), 500),
    ];
    let device = [
        (wide(1, 900, 64).full(), 16),
        (wide(700, 700, 100).full(), 40),
    ];
    let small = [(case(9, 40, 6).full(), 7)];
    check_all(engine, left_out, small, medium, device);
}

/// Keys that are attended to, and miss the window, over several chunks of queries.
pub(super) fn long_rows<E: Engine>(engine: &E, left_out: bool) {
    let long = |q_len, k_len, window| Case {
        batch: 1,
        ..wide(q_len, k_len, window)
    };
    let deterministic = long(2300, 2500, 512).options(|o| o.with_deterministic(true));
    let device = [
        (long(2300, 2500, 512), 128),
        // More runners-up than kept keys, many of them on a few positions each.
        (long(2500, 2300, 40), 600),
        // All chunks have the same ones.
        (long(2100, 900, 64).full(), 300),
        (deterministic, 128),
    ];
    check_all(engine, left_out, [], [], device);
}

pub(super) fn out_alone<E: Engine>(engine: &E, left_out: bool) {
    let out_alone = |case: Case, more| {
        let grad_lse = false;
        [(Case { grad_lse, ..case }, more)]
    };
    let small = out_alone(case(40, 40, 6), 3);
    let medium = out_alone(case(250, 250, 40), 10);
    let device = out_alone(wide(700, 700, 100).heads(4, 1), 50);
    check_all(engine, left_out, small, medium, device);
}

/// Without a gradient of the LSE that term is not computed at all: 0 times infinity would be NaN.
fn without_a_gradient_of_the_lse<E: Engine>(engine: &E) {
    let mut small = case(40, 40, 6);
    small.grad_lse = false;
    let mut inputs = small.inputs();
    // A selected key of score ∞ makes its rows NaN; a runner-up of score ∞ is infinitely above the LSE of the others.
    let z = inputs.scores.as_mut().expect("there are scores");
    z[..10].fill(f64::INFINITY);
    let exact = inputs.rank_gradient(3, &small.gradients(&inputs).out, None);
    let runners = (small, 3);
    let (_, grads) = run(engine, &call(engine, &runners, &inputs, false));
    let Some(rank) = grads.rank else { return };
    for (n, (rank, exact)) in rank.iter().zip(&exact.values).enumerate() {
        assert_eq!(
            rank.is_nan(),
            exact.is_nan(),
            "key {n}: {rank} instead of {exact}"
        );
    }
}

/// Checks every bit of two results, except the gradients of scores and rank.
pub(super) fn assert_all_but_scores_same(
    (outputs, grads): &(Outputs, Gradients),
    (other, others): &(Outputs, Gradients),
    what: &str,
) {
    for (name, a, b) in [
        ("out", &outputs.out, &other.out),
        ("lse", &outputs.lse, &other.lse),
        ("dq", &grads.q, &others.q),
        ("dk", &grads.k, &others.k),
        ("dv", &grads.v, &others.v),
    ] {
        assert_same(a, b, name, what);
    }
}

pub(super) fn assert_same(a: &[f64], b: &[f64], name: &str, what: &str) {
    let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same && a.len() == b.len(), "{name} on {what}");
}

/// Cases with a fixed order of sums, of the engines that compute runners-up in different ways.
pub(super) fn in_fixed_order<E: Engine>(engine: &E) -> Vec<Runners> {
    let of = |len, window, (dim, element)| {
        let case = case(len, len, window).dim(dim).element(element);
        case.options(|o| o.with_deterministic(true))
    };
    let kinds = [(32, F32), (64, Bf16)];
    let cases = E::cases_or_device(
        [(of(40, 6, kinds[0]), 3)],
        kinds.map(|kind| (of(300, 40, kind), 10)),
        kinds.map(|kind| (of(3000, 300, kind).heads(4, 1), 75)),
    );
    engine.supported(cases, |(case, _)| case.element)
}

/// With a fixed order everything else keeps its bits.
fn nothing_else_changes<E: Engine>(engine: &E) {
    for runners in in_fixed_order(engine) {
        let case = &runners.0;
        let call = call(engine, &runners, &case.inputs(), false);
        let [with, repeated] = [(); 2].map(|()| run(engine, &call));
        let without = run(
            engine,
            &Call {
                runner_up_ends: None,
                ..call
            },
        );
        let what = format!("{} at {case:?}", E::NAME);
        for other in [&repeated, &without] {
            assert_all_but_scores_same(&with, other, &what);
        }
        let [(_, with), (_, repeated), (_, without)] = [with, repeated, without];
        let scores = |grads: &Gradients| grads.scores.clone().expect("there are scores");
        assert_same(&scores(&with), &scores(&repeated), "dscores", &what);
        assert!(without.rank.is_none());
        match (&with.rank, &repeated.rank) {
            (Some(rank), Some(repeated)) => {
                assert_same(rank, repeated, "rank", &what);
                assert_same(&scores(&with), &scores(&without), "dscores", &what);
                assert!(rank.iter().any(|&x| x != 0.0), "a rank on {what}");
            }
            _ => assert_ne!(scores(&with), scores(&without), "dscores on {what}"),
        }
    }
}

/// A NaN in the rows of a key that is never more than a runner-up reaches the gradient of its own rank only.
fn a_nan_stays_with_its_runner_up<E: Engine>(engine: &E) {
    let small = case(40, 40, 4).scores(Scores::Decreasing);
    let medium = case(300, 300, 40).scores(Scores::Decreasing).dim(64);
    let large = wide(3000, 3000, 300).scores(Scores::Decreasing);
    let cases = E::cases_or_device([small], [medium], [large]);
    for case in engine.supported(cases, |case| case.element) {
        let case = case.options(|o| o.with_deterministic(true));
        let runners = (case.clone(), 3);
        let clean = case.inputs();
        let (outputs, without) = run(engine, &call(engine, &runners, &clean, false));
        let key = clean.problem.window + 1;
        let scores = clean.scores.as_ref().expect("there are scores");
        let (head, last) = (&scores[..case.k_len], case.k_len as i64 - 1);
        let selected = select::selected(head, clean.problem.window, last);
        assert!(!selected.contains(&key), "the key is never attended");
        for of_k in [true, false] {
            let mut inputs = clean.clone();
            let row = if of_k { &mut inputs.k } else { &mut inputs.v };
            row[key * case.head_dim] = f64::NAN;
            let (dirty, with) = run(engine, &call(engine, &runners, &inputs, false));
            assert_eq!(outputs.out, dirty.out);
            assert_eq!(outputs.lse, dirty.lse);
            assert_eq!(
                (&with.q, &with.k, &with.v),
                (&without.q, &without.k, &without.v)
            );
            let ranks = |grads: &Gradients| grads.rank.clone().or(grads.scores.clone());
            let [with, without] = [&with, &without].map(|x| ranks(x).expect("scores"));
            for (n, (with, without)) in with.into_iter().zip(without).enumerate() {
                match n == key {
                    true => assert!(with.is_nan(), "{}: key {n} has {with}", E::NAME),
                    false => assert_eq!(with.to_bits(), without.to_bits(), "{}: key {n}", E::NAME),
                }
            }
        }
    }
}

fn strided<E: Engine>(engine: &E, layout: Layout) {
    let strided = |case: Case, more| [(case.layout(layout), more)];
    let medium = strided(case(130, 150, 20).heads(4, 2), 5);
    let device = strided(wide(600, 600, 100).heads(4, 2), 30);
    check_all(engine, false, strided(case(40, 40, 6), 3), medium, device);
}

every_engine!(
    of_every_length,
    of_every_window,
    of_every_kind_of_scores: kinds(&[1, 9, 500], false),
    of_groups: groups(&[(4, 4), (4, 1)], ([257, 300, 64], 16), false),
    of_groups_of_many: groups(&[(8, 1), (6, 2)], ([113, 239, 40], 10), false),
    of_head_dims_in_f32: head_dims([24, 256], F32),
    of_head_dims_in_f16: head_dims([64, 128], F16),
    of_head_dims_in_bf16: head_dims([128, 256], Bf16),
    of_narrow_heads_in_bf16: head_dims([32, 96], Bf16),
    of_softcaps_scales_and_alibi,
    of_one_position: one_position(false),
    of_long_rows: long_rows(false),
    of_out_alone: out_alone(false),
    // Memory in which only the first row of a tensor is aligned: not for tensor cores.
    of_padded_rows: strided(Padded),
    // Heads that lie side by side.
    of_transposed_heads: strided(Transposed),
    nothing_else_changes,
    a_nan_stays_with_its_runner_up,
);
raw_engines!(without_a_gradient_of_the_lse);
