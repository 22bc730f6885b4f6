//! Logits of any size: with an offset that rounds them, outputs and gradients are those of a softmax that subtracts its
//! greatest logit. An additive mask of −1e9 on padding is enough to have them.
//!
//! Products of q and k are multiples of a small power of two here: f32 has them exactly, in any order of their terms,
//! so that every engine has the logits of the oracle, bit by bit.

use flash_dma_reference::compare::sum;
use flash_dma_reference::generate::normal;
use flash_dma_tests::Layout::Contiguous;
use flash_dma_tests::Passes;
use flash_dma_tests::prelude::*;

/// Every offset that masks and scores have in practice, and the least numbers of f32 and bf16.
const OFFSETS: [f64; 12] = [
    -1e4,
    1e4,
    -1e5,
    1e5,
    -1e6,
    1e7,
    -1e8,
    1e8,
    -1e9,
    1e9,
    f32::MIN as f64,
    -3.389_531_4e38,
];

/// Batch, query heads, kv heads, queries, keys, elements per row.
type Sizes = [usize; 6];

fn problem_of(
    sizes: Sizes,
    scores: bool,
    element: ElementType,
    options: AttentionOptions,
) -> Problem {
    let [batch, q_heads, kv_heads, q_len, k_len, dim] = sizes;
    let (q, kv) = ([batch, q_heads, q_len, dim], [batch, kv_heads, k_len, dim]);
    problem(q, kv, scores, element, &options)
}

/// Rows of halves between −1 and 1.
fn halves(shape: [usize; 4], rng: &mut Rng) -> Vec<f64> {
    let len: usize = shape.iter().product();
    (0..len).map(|_| rng.below(5) as f64 / 2.0 - 1.0).collect()
}

/// Normal numbers around `offset` where `at` holds and around 0 elsewhere, rounded to f32.
fn around(offset: f64, len: usize, rng: &mut Rng, at: impl Fn(usize) -> bool) -> Vec<f64> {
    let normal = normal(len, 1.0, F32, rng);
    let moved = |(n, x): (usize, f64)| match at(n) {
        true => f64::from((x + offset) as f32),
        false => x,
    };
    normal.into_iter().enumerate().map(moved).collect()
}

/// Inputs without a mask, whose bias is given.
fn biased(problem: Problem, shape: [usize; 4], values: Vec<f64>, rng: &mut Rng) -> MaskedInputs {
    let (q, kv) = (problem.q_shape(), problem.kv_shape());
    MaskedInputs {
        problem,
        q: halves(q, rng),
        k: halves(kv, rng),
        v: normal(kv.iter().product(), 1.0, problem.element, rng),
        visible: None,
        bias: Some(Broadcast { shape, values }),
    }
}

/// Seeds of other inputs of the same kind, at which the naive implementation's error is measured, too: few rows of 16 bits
/// are a poor measure, as [`Expected::check`] says.
fn other_seeds(element: ElementType) -> core::ops::Range<u64> {
    if element == F32 { 0..0 } else { 1..4 }
}

fn expected_of_masked(inputs: &MaskedInputs, grads: &Grads) -> Expected {
    let (p, (grad_out, grad_lse)) = (&inputs.problem, grads.parts());
    let mut expected = Expected::new(p, inputs.rounded().forward(), &inputs.naive_forward());
    let exact = inputs.rounded().backward(grad_out, grad_lse);
    let (naive, naive_bias) = inputs.naive_backward(grad_out, grad_lse);
    expected.qkv(p, [exact.q, exact.k, exact.v], &naive);
    let bias = inputs.bias.as_ref().expect("there is a bias");
    let of_bias = exact.bias.zip(naive_bias).expect("there is a bias");
    expected.gradient("dbias", &bias.shape, of_bias);
    expected
}

/// Compares outputs and gradients with attention in f64 over the logits as f32 rounds them, and the sum of the
/// gradients of v for a gradient of ones with the number of rows: each row's probabilities add up to 1. `inputs_of`
/// makes the inputs of a seed; `expected` gives their results, and `run` the engine's.
fn check<E: Engine, I>(
    engine: &E,
    [seed, of_grads]: [u64; 2],
    inputs_of: impl Fn(&mut Rng) -> I,
    problem_of: impl Fn(&I) -> Problem,
    run: impl Fn(&I, &Grads) -> Passes,
    expected: impl Fn(&I, &Grads) -> Expected,
    what: &str,
) {
    let inputs = inputs_of(&mut Rng::new(seed));
    let p = &problem_of(&inputs);
    if engine.lacks(p.element) {
        return;
    }
    let what = format!("{}: {what}, {p:?}", E::NAME);
    let run = |grads: &Grads| {
        let result = run(&inputs, grads);
        result.unwrap_or_else(|refused| panic!("{what}: {}", refused.error))
    };
    let grads = Grads::random(p, of_grads);
    let (outputs, actual) = run(&grads);
    let others = || {
        let of_seed = |other: u64| inputs_of(&mut Rng::new(seed + (other << 32)));
        let expected = |other| expected(&of_seed(other), &grads);
        other_seeds(p.element).map(expected).collect()
    };
    expected(&inputs, &grads).check(others, &outputs, &actual.given(), &what);

    let (_, ones) = run(&Grads::of_out(vec![1.0; grads.out.len()]));
    assert_rows_add_up(&ones.v, p, &what);
}

fn check_masked<E: MaskedEngine>(
    engine: &E,
    inputs_of: impl Fn(&mut Rng) -> MaskedInputs,
    what: &str,
) {
    let run = |inputs: &MaskedInputs, grads: &Grads| {
        engine.masked(&MaskedCall::new(inputs, Contiguous, false, grads))
    };
    let p = |inputs: &MaskedInputs| inputs.problem;
    let expected = expected_of_masked;
    check(engine, [7, 5], inputs_of, p, run, expected, what);
}

/// Checks the sum; in 16 bits the gradient of v itself is rounded, by at most 2⁻⁸ of each element, half of them up.
fn assert_rows_add_up(dv: &[f64], p: &Problem, what: &str) {
    let heads = p.batch * p.kv_heads;
    let bound = if p.element == F32 { 1e-4 } else { 4e-3 };
    for head in 0..heads {
        let keys = dv[head * p.k_len * p.head_dim..].chunks(p.head_dim);
        let sum: f64 = keys.take(p.k_len).map(|row| row[0]).sum();
        let rows = (p.group() * p.q_len) as f64;
        assert!(
            (sum / rows - 1.0).abs() <= bound,
            "{what}: the probabilities of {rows} rows add up to {sum}"
        );
    }
}

/// The element types; a device that compiles its kernels slowly gets only one in 16 bits.
fn elements<E: Engine>() -> &'static [ElementType] {
    match E::SIZE {
        Size::Small => &[F32, F16],
        Size::Medium | Size::Large => &[F32, F16, Bf16],
    }
}

/// A few rows of several heads, and one query with many keys, whose keys some engines share out.
fn sizes<E: Engine>() -> [Sizes; 2] {
    let keys = if E::SIZE == Size::Small { 96 } else { 600 };
    [[1, 2, 1, 24, 40, 64], [2, 2, 1, 1, keys, 64]]
}

fn offsets_that_leave_logits_on_the_grid_of_f32_change_nothing<E: MaskedEngine>(engine: &E) {
    let keys = E::cases([2, 64], [1000], []);
    for keys in keys {
        let options = AttentionOptions::new().with_causal(false);
        let p = problem_of([1, 2, 1, 3, keys, 64], false, F32, options);
        let shape = [1, 1, 1, keys];
        for offset in [-1e9, 1e9, f64::from(f32::MIN)] {
            // Equal keys, and queries of 0: equal logits.
            let equal_keys = |rng: &mut Rng| {
                let mut inputs = biased(p, shape, vec![offset; keys], rng);
                let row = inputs.k[..64].to_vec();
                inputs.k = row.repeat(keys);
                inputs
            };
            let queries_of_0 = |rng: &mut Rng| {
                let mut inputs = equal_keys(rng);
                inputs.q.fill(0.0);
                inputs
            };
            check_masked(engine, equal_keys, &format!("equal keys at {offset:e}"));
            check_masked(engine, queries_of_0, &format!("queries of 0 at {offset:e}"));
        }
        // One number in 128 is an f32 there: logits of 1024 apart, so that one key has all the weight, or equal ones.
        let integers = |rng: &mut Rng| {
            let whole = |_| 1024.0 * rng.below(3) as f64 + f64::from(1 << 30);
            let values = (0..keys).map(whole).collect();
            let mut inputs = biased(p, shape, values, rng);
            inputs.q.fill(0.0);
            inputs
        };
        check_masked(engine, integers, "integers times 1024");
    }
}

fn a_bias_of_keys_may_have_any_offset<E: MaskedEngine>(engine: &E) {
    for element in elements::<E>() {
        for sizes @ [_, _, _, _, keys, _] in sizes::<E>() {
            let p = problem_of(sizes, false, *element, AttentionOptions::new());
            for offset in OFFSETS {
                let inputs_of = |rng: &mut Rng, padded: &dyn Fn(usize) -> bool| {
                    let values = around(offset, keys, rng, padded);
                    biased(p, [1, 1, 1, keys], values, rng)
                };
                let all = |rng: &mut Rng| inputs_of(rng, &|_| true);
                check_masked(engine, all, &format!("{offset:e} on all keys"));
                // Causal: the first rows see only padding.
                let padded = |rng: &mut Rng| inputs_of(rng, &|key| key < keys / 2);
                check_masked(engine, padded, &format!("{offset:e} on padding"));
            }
        }
    }
}

fn a_bias_of_pairs_may_have_any_offset<E: MaskedEngine>(engine: &E) {
    for element in elements::<E>() {
        for sizes @ [_, _, _, queries, keys, _] in sizes::<E>() {
            let options = AttentionOptions::new().with_causal(false);
            let p = problem_of(sizes, false, *element, options);
            for offset in OFFSETS {
                let inputs_of = |rng: &mut Rng, padded: &dyn Fn(usize) -> bool| {
                    let values = around(offset, queries * keys, rng, padded);
                    biased(p, [1, 1, queries, keys], values, rng)
                };
                let all = |rng: &mut Rng| inputs_of(rng, &|_| true);
                check_masked(engine, all, &format!("{offset:e} on all pairs"));
                // Every third row sees only padding, the others some.
                let every_third =
                    |pair: usize| (pair / keys).is_multiple_of(3) || pair.is_multiple_of(2);
                let padded = |rng: &mut Rng| inputs_of(rng, &every_third);
                check_masked(engine, padded, &format!("{offset:e} on padded pairs"));
            }
        }
    }
}

/// More queries than an engine has tiles of at once: some tiles have rows of large logits, some only such rows, some
/// none, and each head has its own padding.
fn large_logits_among_many_queries<E: MaskedEngine>(engine: &E) {
    for keys in E::cases([70], [], [700]) {
        let options = AttentionOptions::new();
        let p = problem_of([1, 2, 1, keys, keys, 64], false, F16, options);
        let inputs = |rng: &mut Rng| {
            let first = around(-1e4, keys, rng, |key| key < keys / 3);
            let second = around(-1e9, keys, rng, |key| key < keys / 2);
            biased(p, [1, 2, 1, keys], [first, second].concat(), rng)
        };
        check_masked(engine, inputs, "padding of its own for each head");
    }
}

fn a_softcap_bounds_what_the_offset_leaves<E: MaskedEngine>(engine: &E) {
    let [sizes @ [_, _, _, _, keys, _], _] = sizes::<E>();
    let options = AttentionOptions::new().with_softcap(5.0);
    let p = problem_of(sizes, false, F32, options);
    let inputs = |rng: &mut Rng| biased(p, [1, 1, 1, keys], vec![-1e9; keys], rng);
    check_masked(engine, inputs, "a softcap at -1e9");
}

fn scored(problem: Problem, scores: Vec<f64>, rng: &mut Rng) -> Inputs {
    let (q, kv) = (problem.q_shape(), problem.kv_shape());
    Inputs {
        problem,
        q: halves(q, rng),
        k: halves(kv, rng),
        v: normal(kv.iter().product(), 1.0, problem.element, rng),
        scores: problem.has_scores.then_some(scores),
    }
}

/// [`expected_of_masked`] for scored inputs.
fn expected_of_scored(inputs: &Inputs, grads: &Grads) -> Expected {
    let (p, (grad_out, grad_lse)) = (&inputs.problem, grads.parts());
    let mut expected = Expected::new(p, inputs.rounded().forward(), &inputs.naive_forward());
    let exact = inputs.rounded().backward(grad_out, grad_lse);
    let naive = inputs.naive_backward(grad_out, grad_lse);
    expected.qkv(p, [exact.q, exact.k, exact.v], &naive);
    if let Some(of_scores) = exact.scores.zip(naive.scores) {
        expected.gradient("dscores", &p.scores_shape(), of_scores);
    }
    expected
}

fn check_scored<E: Engine>(engine: &E, inputs_of: impl Fn(&mut Rng) -> Inputs, what: &str) {
    let run =
        |inputs: &Inputs, grads: &Grads| engine.backward(&engine.call(inputs, Contiguous, grads));
    let p = |inputs: &Inputs| inputs.problem;
    let expected = expected_of_scored;
    check(engine, [10, 6], inputs_of, p, run, expected, what);
}

fn scores_may_have_any_offset<E: Engine>(engine: &E) {
    for element in elements::<E>() {
        for sizes @ [batch, _, heads, _, keys, _] in sizes::<E>() {
            let options = AttentionOptions::new().with_keep_window(keys / 3);
            let p = problem_of(sizes, true, *element, options);
            for offset in OFFSETS {
                let inputs_of = |rng: &mut Rng, padded: &dyn Fn(usize) -> bool| {
                    let scores = around(offset, batch * heads * keys, rng, padded);
                    scored(p, scores, rng)
                };
                let all = |rng: &mut Rng| inputs_of(rng, &|_| true);
                check_scored(engine, all, &format!("{offset:e} on all keys"));
                let padded = |rng: &mut Rng| inputs_of(rng, &|key| key % keys < keys / 2);
                check_scored(engine, padded, &format!("{offset:e} on padding"));
            }
        }
    }
}

fn scores_times_a_thousand_have_the_gradients_of_a_naive_pass<E: Engine>(engine: &E) {
    for factor in [1e3, 1e5, 1e7] {
        let options = AttentionOptions::new().with_keep_window(24);
        let p = problem_of([1, 2, 1, 64, 64, 64], true, F32, options);
        // Near each other in pairs, so that more than one key has a weight.
        let inputs = |rng: &mut Rng| {
            let size: Vec<f64> = normal(32, factor, F32, rng);
            let scores = (0..64).map(|key| f64::from((size[key / 2] + (key % 2) as f64) as f32));
            scored(p, scores.collect(), rng)
        };
        check_scored(engine, inputs, &format!("scores times {factor:e}"));
    }
}

fn logits_may_be_large_by_their_products_alone<E: Engine>(engine: &E) {
    for element in [F16, F32] {
        let options = AttentionOptions::new();
        let p = problem_of([1, 2, 1, 48, 48, 64], false, element, options);
        // Integers of about 100, so that f32 has their products; keys come in pairs of neighbours.
        let inputs = |rng: &mut Rng| {
            let mut inputs = scored(p, Vec::new(), rng);
            let mut integers = |len| -> Vec<f64> {
                let normal = normal(len, 100.0, F32, rng);
                normal.into_iter().map(f64::round).collect()
            };
            inputs.q = integers(inputs.q.len());
            let keys = integers(inputs.k.len() / 2);
            let pairs = keys.chunks(64).flat_map(|row| [row, row]);
            inputs.k = pairs.flatten().copied().collect();
            for second in inputs.k.chunks_mut(128) {
                second[64] += 1.0;
            }
            inputs
        };
        check_scored(engine, inputs, "entries of about 100");
    }
}

fn ranks_learn_under_an_offset<E: Engine>(engine: &E) {
    let more = 6;
    for offset in [-1e9, 1e6, -1e4] {
        let options = AttentionOptions::new().with_keep_window(10);
        let p = problem_of([1, 2, 1, 40, 40, 64], true, F32, options);
        let mut rng = Rng::new(14);
        let scores = around(offset, 40, &mut rng, |_| true);
        let inputs = scored(p, scores, &mut rng);
        let grads = Grads::random(&p, 6);
        let (grad_out, grad_lse) = grads.parts();
        let mut call = engine.call(&inputs, Contiguous, &grads);
        let scores = call.scores.as_ref().expect("there are scores");
        let wider = engine.select(scores, p.window + more).expect("select");
        call.runner_up_ends = Some(wider.iter().map(|interval| interval.end).collect());
        let from: Vec<u32> = (0..40).collect();
        call.kept_from = Some(from.clone());
        let what = format!("{}: ranks at {offset:e}", E::NAME);
        let (_, actual) =
            (engine.backward(&call)).unwrap_or_else(|refused| panic!("{what}: {}", refused.error));

        let rounded = inputs.rounded();
        let gained = rounded.rank_gradient(more, grad_out, grad_lse);
        let naive_gained = inputs.naive_rank_gradient(more, grad_out, grad_lse);
        let lost = rounded.left_out_gradient(&from, grad_out, grad_lse);
        let naive_lost = inputs.naive_left_out_gradient(&from, grad_out, grad_lse);
        let mut rank = sum((gained, naive_gained), &(lost, naive_lost));
        let mut expected = Expected::new(&p, rounded.forward(), &inputs.naive_forward());
        let actual = match actual.rank {
            Some(actual) => actual,
            // Under autodiff it is in that of the scores.
            None => {
                let exact = rounded.backward(grad_out, grad_lse).scores;
                let naive = inputs.naive_backward(grad_out, grad_lse).scores;
                let of_scores = exact.zip(naive).expect("there are scores");
                rank = sum(rank, &of_scores);
                actual.scores.expect("there are scores")
            }
        };
        expected.gradient("rank", &p.scores_shape(), rank);
        expected.check_one("rank", &actual, &what);
    }
}

every_engine!(
    offsets_that_leave_logits_on_the_grid_of_f32_change_nothing,
    a_bias_of_keys_may_have_any_offset,
    a_bias_of_pairs_may_have_any_offset,
    large_logits_among_many_queries,
    a_softcap_bounds_what_the_offset_leaves,
    scores_may_have_any_offset,
    scores_times_a_thousand_have_the_gradients_of_a_naive_pass,
    logits_may_be_large_by_their_products_alone,
    ranks_learn_under_an_offset,
);
