//! The gradient of runners-up: keys outside of the window, which learn what the loss would change by if they were
//! attended.

use flash_dma_problem::ElementType::{self, Bf16, F16, F32};
use flash_dma_reference::compare::Exact;
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::{Inputs, select};
use flash_dma_tests::case::expected;
use flash_dma_tests::engine::skip;
use flash_dma_tests::{Call, Case, Engine, Gradients, Outputs, every_engine, raw_engines};

/// A case and how many runners-up each query has.
type Runners = (Case, usize);

/// The gradients of `out` and, if the case has them, of the LSE.
fn incoming(case: &Case, inputs: &Inputs) -> (Vec<f64>, Option<Vec<f64>>) {
    let (grad_out, grad_lse) = generate::gradients(&inputs.problem, case.seed);
    (grad_out, case.grad_lse.then_some(grad_lse))
}

/// The call with its runners-up, whose ends are those of a window that keeps more keys.
fn call<E: Engine>(engine: &E, (case, more): &Runners, inputs: &Inputs) -> Call {
    let (grad_out, grad_lse) = incoming(case, inputs);
    let mut call = engine.call(inputs, case.layout, (&grad_out, grad_lse.as_deref()));
    let scores = call.scores.as_ref().expect("runners-up have scores");
    let wider = engine.select(scores, inputs.problem.window.saturating_add(*more));
    call.far = Some(wider.expect("select").iter().map(|i| i.end).collect());
    call
}

fn run<E: Engine>(engine: &E, call: &Call) -> (Outputs, Gradients) {
    let result = engine.backward(call);
    result.unwrap_or_else(|refused| panic!("{} refuses: {}", E::NAME, refused.error))
}

/// Compares the gradient of the rank with the oracle's sum over queries and runners-up; if the scores rank and bias the
/// keys in one, the sum of both gradients with the sum of both.
fn check<E: Engine>(engine: &E, runners: &Runners) {
    let (case, more) = runners;
    if !engine.supports(case.element) {
        return skip::<E>(&format!("{}", case.element));
    }
    check_inputs(engine, runners, &case.inputs(), *more);
}

fn check_inputs<E: Engine>(engine: &E, runners: &Runners, inputs: &Inputs, more: usize) {
    let case = &runners.0;
    let (_, grads) = run(engine, &call(engine, runners, inputs));
    let (grad_out, grad_lse) = incoming(case, inputs);
    let grad_lse = grad_lse.as_deref();
    let mut wanted = expected(inputs, &grad_out, grad_lse);
    let exact = inputs.rank_gradient(more, &grad_out, grad_lse);
    let naive = inputs.naive_rank_gradient(more, &grad_out, grad_lse);
    let shape = inputs.problem.scores_shape();
    let what = format!("{} at {case:?}, {more} runners-up", E::NAME);
    let scores = grads.scores.expect("there are scores");
    if let Some(rank) = grads.rank {
        wanted.check_one("dscores", &scores, &what);
        wanted.gradient("rank", &shape, F32, exact, &naive);
        return wanted.check_one("rank", &rank, &what);
    }
    let bias = inputs.backward(&grad_out, grad_lse).scores;
    let bias = bias.expect("there are scores");
    let naive_bias = inputs.naive_backward(&grad_out, grad_lse).scores;
    let naive_bias = naive_bias.expect("there are scores");
    let sum = |a: &[f64], b: &[f64]| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
    let both = Exact {
        values: sum(&bias.values, &exact.values),
        magnitude: sum(&bias.magnitude, &exact.magnitude),
    };
    wanted.gradient("both", &shape, F32, both, &sum(&naive_bias, &naive));
    wanted.check_one("both", &scores, &what);
}

fn case(q_len: usize, k_len: usize, window: usize) -> Case {
    Case::new(q_len, k_len).window(window)
}

fn of_every_kind<E: Engine>(engine: &E) {
    let small = [
        (case(40, 40, 6), 3),
        (case(23, 40, 6).options(|o| o.with_softcap(1.5)), 3),
        (case(9, 40, 6).full(), 7),
    ];
    let mut medium: Vec<Runners> = vec![
        (case(257, 257, 64).heads(4, 1), 16),
        (case(257, 257, 64).heads(4, 4), 16),
        (case(113, 239, 40).heads(8, 2), 10),
        (case(239, 113, 40), 10),
        (case(1, 257, 64).full(), 16),
        (case(1, 257, 64), 16),
        (case(300, 300, 1), 1),
        (case(300, 300, 1), 1000),
        // Every key is attended, so that nobody misses the window.
        (case(100, 100, 100), 20),
        (case(100, 100, 60), 0),
        (case(257, 257, 64).deviation(30.0), 16),
        (
            case(257, 257, 64).options(|o| o.with_softcap(3.0).with_scale(0.7)),
            16,
        ),
    ];
    for dim in [32, 64, 128, 256] {
        medium.push((case(129, 129, 32).dim(dim), 8));
    }
    for element in [F32, F16, Bf16] {
        medium.push((case(200, 200, 32).dim(32).element(element), 8));
    }
    for scores in Scores::ALL {
        for more in [1, 9, 500] {
            medium.push((case(150, 150, 20).scores(scores), more));
        }
    }
    let mut large = vec![
        (case(5000, 5000, 512).heads(4, 1).dim(64), 128),
        (case(1023, 5000, 300).heads(4, 1).dim(64), 300),
        (
            case(2100, 2100, 512)
                .dim(64)
                .options(|o| o.with_deterministic(true)),
            128,
        ),
    ];
    for (dim, element) in [
        (64, F16),
        (64, Bf16),
        (128, F16),
        (128, Bf16),
        (256, Bf16),
        (32, Bf16),
        (96, Bf16),
    ] {
        for (softcap, causal) in [(None, true), (Some(2.0f32), true), (None, false)] {
            let mut case = case(1700, 1700, 300).heads(4, 1).dim(dim).element(element);
            case.options.softcap = softcap;
            case.options.causal = causal;
            large.push((case, 75));
        }
    }
    for (q_heads, kv_heads) in [(1, 1), (3, 1), (6, 2), (16, 1)] {
        let case = case(700, 900, 100)
            .heads(q_heads, kv_heads)
            .dim(64)
            .element(Bf16);
        large.push((case, 40));
    }
    let mut no_lse = case(1500, 1500, 200).dim(128).element(Bf16).heads(4, 1);
    no_lse.grad_lse = false;
    large.push((no_lse, 50));
    for runners in E::cases(small, medium, large) {
        check(engine, &runners);
    }
}

/// Without a gradient of the LSE that term is not computed at all: 0 times infinity would be NaN.
fn without_a_gradient_of_the_lse<E: Engine>(engine: &E) {
    let mut small = case(40, 40, 6);
    small.grad_lse = false;
    let mut inputs = small.inputs();
    // A selected key of score ∞ makes its rows NaN; a runner-up of score ∞ is infinitely above the LSE of the others.
    let z = inputs.scores.as_mut().expect("there are scores");
    z[..10].fill(f64::INFINITY);
    let (grad_out, _) = incoming(&small, &inputs);
    let exact = inputs.rank_gradient(3, &grad_out, None);
    let runners = (small, 3);
    let (_, grads) = run(engine, &call(engine, &runners, &inputs));
    let Some(rank) = grads.rank else { return };
    for (n, (rank, exact)) in rank.iter().zip(&exact.values).enumerate() {
        assert_eq!(
            rank.is_nan(),
            exact.is_nan(),
            "key {n}: {rank} instead of {exact}"
        );
    }
}

/// The elements that an engine may compute by the runners-up at all: with a fixed order everything else keeps its bits.
fn nothing_else_changes<E: Engine>(engine: &E) {
    let elements: &[(usize, ElementType)] = &[(32, F32), (64, Bf16)];
    let of = |q_len, k_len, window, (dim, element): (usize, ElementType)| {
        let case = case(q_len, k_len, window).dim(dim).element(element);
        case.options(|o| o.with_deterministic(true))
    };
    let cases = E::cases(
        [(of(40, 40, 6, elements[0]), 3)],
        elements.iter().map(|&e| (of(300, 300, 40, e), 10)),
        elements
            .iter()
            .map(|&e| (of(3000, 3000, 300, e).heads(4, 1), 75)),
    );
    for runners in cases {
        let case = &runners.0;
        if !engine.supports(case.element) {
            skip::<E>(&format!("{}", case.element));
            continue;
        }
        let call = call(engine, &runners, &case.inputs());
        let (outputs, with) = run(engine, &call);
        let (again, repeated) = run(engine, &call);
        let (plain, without) = run(engine, &Call { far: None, ..call });
        let what = format!("{} at {case:?}", E::NAME);
        let same = |a: &[f64], b: &[f64], name| {
            let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same && a.len() == b.len(), "{name} on {what}");
        };
        for (other, grads) in [(&again, &repeated), (&plain, &without)] {
            same(&outputs.out, &other.out, "out");
            same(&outputs.lse, &other.lse, "lse");
            same(&with.q, &grads.q, "dq");
            same(&with.k, &grads.k, "dk");
            same(&with.v, &grads.v, "dv");
        }
        let scores = |grads: &Gradients| grads.scores.clone().expect("there are scores");
        same(&scores(&with), &scores(&repeated), "dscores");
        assert!(without.rank.is_none());
        match (&with.rank, &repeated.rank) {
            (Some(rank), Some(repeated)) => {
                same(rank, repeated, "rank");
                same(&scores(&with), &scores(&without), "dscores");
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
    let large = case(3000, 3000, 300)
        .scores(Scores::Decreasing)
        .dim(64)
        .element(Bf16);
    for case in E::cases([small], [medium], [large]) {
        if !engine.supports(case.element) {
            skip::<E>(&format!("{}", case.element));
            continue;
        }
        let case = case.options(|o| o.with_deterministic(true));
        let runners = (case.clone(), 3);
        let clean = case.inputs();
        let (outputs, without) = run(engine, &call(engine, &runners, &clean));
        let key = clean.problem.window + 1;
        let head = |n: usize| {
            select::selected(
                &clean.scores.as_ref().expect("there are scores")[n * case.k_len..][..case.k_len],
                clean.problem.window,
                case.k_len as i64 - 1,
            )
        };
        assert!(!head(0).contains(&key), "the key is never attended");
        for of_k in [true, false] {
            let mut inputs = clean.clone();
            let row = if of_k { &mut inputs.k } else { &mut inputs.v };
            row[key * case.head_dim] = f64::NAN;
            let (dirty, with) = run(engine, &call(engine, &runners, &inputs));
            assert_eq!(outputs.out, dirty.out);
            assert_eq!(outputs.lse, dirty.lse);
            assert_eq!(
                (&with.q, &with.k, &with.v),
                (&without.q, &without.k, &without.v)
            );
            let ranks = |grads: &Gradients| grads.rank.clone().or(grads.scores.clone());
            let (with, without) = (ranks(&with), ranks(&without));
            let pairs = with
                .expect("scores")
                .into_iter()
                .zip(without.expect("scores"));
            for (n, (with, without)) in pairs.enumerate() {
                match n == key {
                    true => assert!(with.is_nan(), "{}: key {n} has {with}", E::NAME),
                    false => assert_eq!(with.to_bits(), without.to_bits(), "{}: key {n}", E::NAME),
                }
            }
        }
    }
}

/// Memory in which only the first row of a tensor is aligned, or the heads lie side by side.
fn of_strided_tensors<E: Engine>(engine: &E) {
    use flash_dma_tests::Layout::{Padded, Transposed};
    let cases = E::cases(
        [(case(40, 40, 6).layout(Transposed), 3)],
        [(case(130, 150, 20).layout(Padded), 5)],
        [Padded, Transposed].map(|layout| {
            let case = case(600, 600, 100).dim(64).element(Bf16).heads(4, 2);
            (case.layout(layout), 30)
        }),
    );
    for runners in cases {
        check(engine, &runners);
    }
}

every_engine!(
    of_every_kind,
    nothing_else_changes,
    a_nan_stays_with_its_runner_up,
    of_strided_tensors,
);
raw_engines!(without_a_gradient_of_the_lse);
