//! Problems of the tensor-core engines, f16 and bf16 with head dimensions that are multiples of 32, in all variants of
//! their kernels. Without tensor cores the portable kernels compute the same problems.

use flash_dma_tests::case::expected;
use flash_dma_tests::prelude::*;

matrix_engines!(
    narrow_heads_in_f16: head_dims(NARROW, F16),
    narrow_heads_in_bf16: head_dims(NARROW, Bf16),
    // Kernels with scores and without are compiled in a test each: on a GPU that takes most of the time.
    wide_heads_in_f16: with_scores(WIDE, F16),
    wide_heads_in_bf16: with_scores(WIDE, Bf16),
    wide_heads_in_f16_without_scores: without_scores(WIDE, F16),
    wide_heads_in_bf16_without_scores: without_scores(WIDE, Bf16),
    widest_heads_in_f16: head_dims(WIDEST, F16),
    widest_heads_in_bf16: head_dims(WIDEST, Bf16),
    groups_that_divide_a_tile: groups([&[(2, 2)], &[(8, 2)], &[(1, 1)]]),
    groups_that_do_not: groups([&[], &[(3, 1)], &[(7, 1)]]),
    groups_of_many: groups([&[], &[], &[(12, 2), (65, 1)]]),
    options_in_f16: options(F16),
    options_in_bf16: options(Bf16),
    options_in_f16_without_scores: options_without_scores(F16),
    options_in_bf16_without_scores: options_without_scores(Bf16),
    scales_and_windows_in_f16: scales_and_windows(F16),
    scales_and_windows_in_bf16: scales_and_windows(Bf16),
    chunks_of_queries: chunks(64, [(2100, 100, 2), (4099, 1500, 2), (3000, 5, 2)]),
    chunks_of_queries_of_wide_heads: chunks(128, [(2100, 100, 4), (2200, 1100, 2), (3000, 5, 4)]),
    kinds_of_scores,
    inputs_that_are_not_finite,
    gradients_that_are_not_finite: not_finite(&[(f64::NAN, 3, false), (f64::NAN, 3, true)]),
    capped_infinite_query,
    deterministic,
    results_that_begin_between_segments,
);

fn case(q_len: usize, k_len: usize, dim: usize, element: ElementType) -> Case {
    Case::new(q_len, k_len).dim(dim).element(element)
}

/// Head dimensions of every engine, of those at full speed and of a GPU.
type Dims = [Option<usize>; 3];

const NARROW: Dims = [Some(32), Some(64), Some(96)];
const WIDE: Dims = [None, Some(128), Some(192)];
const WIDEST: Dims = [None, None, Some(256)];

fn of_dims<E: Engine>([small, medium, large]: Dims, element: ElementType) -> Vec<Case> {
    let lengths = E::cases([(19, 23)], [(113, 257)], [(1, 1), (257, 113), (640, 640)]);
    let of_dim = |dim| lengths.iter().map(move |&(q, k)| case(q, k, dim, element));
    E::cases(small, medium, large)
        .into_iter()
        .flat_map(of_dim)
        .collect()
}

fn head_dims<E: Engine>(engine: &E, dims: Dims, element: ElementType) {
    with_scores(engine, dims, element);
    without_scores(engine, dims, element);
}

fn with_scores<E: Engine>(engine: &E, dims: Dims, element: ElementType) {
    let cases = of_dims::<E>(dims, element);
    cases.iter().for_each(|case| case.check(engine));
}

fn without_scores<E: Engine>(engine: &E, dims: Dims, element: ElementType) {
    for case in of_dims::<E>(dims, element) {
        case.plain().check(engine);
    }
}

fn groups<E: Engine>(engine: &E, [small, medium, large]: [&[(usize, usize)]; 3]) {
    for &(q_heads, kv_heads) in E::cases(small, medium, large) {
        for (q_len, k_len) in E::cases([(20, 20)], [(150, 150)], [(333, 400)]) {
            let case = Case {
                // Many heads are enough.
                batch: if q_heads > 16 { 1 } else { 2 },
                ..case(q_len, k_len, 64, Bf16).heads(q_heads, kv_heads)
            };
            case.check(engine);
            case.plain().check(engine);
        }
    }
}

fn options_of<E: Engine>(element: ElementType) -> impl Iterator<Item = Case> {
    let lengths = E::cases([(21, 33)], [(130, 200)], [(700, 650)]).into_iter();
    lengths.map(move |(q_len, k_len)| case(q_len, k_len, 64, element).heads(4, 1))
}

fn options<E: Engine>(engine: &E, element: ElementType) {
    for case in options_of::<E>(element) {
        case.clone().full().check(engine);
        case.options(|o| o.with_softcap(2.0)).check(engine);
    }
}

fn options_without_scores<E: Engine>(engine: &E, element: ElementType) {
    for case in options_of::<E>(element) {
        let case = case.plain();
        case.clone().full().check(engine);
        case.options(|o| o.with_softcap(20.0)).check(engine);
    }
}

fn scales_and_windows<E: Engine>(engine: &E, element: ElementType) {
    for case in options_of::<E>(element) {
        let case = || case.clone();
        case().options(|o| o.with_scale(-0.3)).check(engine);
        case().deviation(30.0).check(engine);
        case().window(1).check(engine);
    }
}

/// Keys that live over several chunks of queries, and few of them per chunk: lengths, windows and query heads.
fn chunks<E: Engine>(engine: &E, dim: usize, large: [(usize, usize, usize); 3]) {
    for (len, window, heads) in E::cases([], [], large) {
        let case = case(len, len, dim, Bf16).heads(heads, 1).window(window);
        // The oracle takes long.
        Case { batch: 1, ..case }.check(engine);
    }
}

fn kinds_of_scores<E: Engine>(engine: &E) {
    for kind in Scores::ALL {
        for len in E::cases([24], [200], [1500]) {
            case(len, len, 32, Bf16).scores(kind).check(engine);
        }
    }
}

/// NaN in every input, attended to by few, by many and by none; infinities for which the sum of a row cannot be told
/// from NaN by the order of its terms.
fn inputs_that_are_not_finite<E: Engine>(engine: &E) {
    let (nan, infinite) = (f64::NAN, f64::INFINITY);
    let all = [
        (nan, 0, false),
        (nan, 1, false),
        (nan, 2, false),
        (infinite, 0, false),
        (infinite, 2, false),
    ];
    not_finite(engine, &all);
}

/// A value in some elements of `k`, `v`, `q` or the gradient of `out`, by its number, causal or full.
fn not_finite<E: Engine>(engine: &E, all: &[(f64, usize, bool)]) {
    for &(value, which, full) in all {
        for (len, window) in E::cases([(40, 4)], [(150, 20)], [(1200, 30), (1100, 1100)]) {
            // The values are those of the second sequence.
            let mut case = Case {
                batch: 2,
                ..case(len, len, 64, F16).window(window)
            };
            if full {
                case = case.full();
            }
            let mut inputs = case.inputs();
            let dim = case.head_dim;
            let mut grads = Grads::random(&inputs.problem, 1);
            for row in [3, 7, 20, len - 1] {
                match which {
                    0 => inputs.k[row * dim + 5] = value,
                    1 => inputs.v[(len + row) * dim + 11] = value,
                    2 => inputs.q[row * dim + 40] = value,
                    _ => grads.out[row * dim + 63] = value,
                }
            }
            case.check_gradients(engine, &inputs, &grads);
        }
    }
}

/// A softcap makes the logits of an infinite query finite: only its elements reveal it. The keys that it does not see
/// keep every bit of their gradients.
fn capped_infinite_query<E: Engine>(engine: &E) {
    if engine.lacks(Bf16) {
        return;
    }
    for len in E::cases([40], [150], [1200]) {
        let case = case(len, len, 64, Bf16)
            .window(30)
            .options(|o| o.with_softcap(5.0).with_deterministic(true));
        let mut inputs = case.inputs();
        let grads = Grads::random(&inputs.problem, 1).without_lse();
        let run = |inputs: &_| {
            let call = engine.call(inputs, case.layout, &grads);
            engine.backward(&call).expect("a good case").1.k
        };
        let clean = run(&inputs);
        inputs.q[20 * case.head_dim + 5] = f64::INFINITY;
        let dirty = run(&inputs);
        let seen = 21 * case.head_dim;
        assert!(clean[seen..] == dirty[seen..], "{len}");
        assert!(dirty[..seen].iter().any(|x| !x.is_finite()), "{len}");
    }
}

/// Rows of results that cannot be written 16 bytes at a time.
fn results_that_begin_between_segments<E: Engine>(engine: &E) {
    for element in [F16, Bf16] {
        for len in E::cases([17], [], [300]) {
            case(len, len, 64, element)
                .layout(Layout::Behind)
                .check(engine);
        }
    }
}

/// The right result if a fixed order of sums is requested, and the same bits every time.
fn deterministic<E: Engine>(engine: &E) {
    if engine.lacks(Bf16) {
        return;
    }
    let case = |len: usize| {
        case(len, len, 64, Bf16)
            .window(len / 10)
            .options(|o| o.with_deterministic(true))
    };
    for len in E::cases([33], [300], [700]) {
        case(len).check(engine);
    }
    // Several chunks of queries, whose parts of a key are gathered. The gradients of scores are left out: one key
    // dominates a row here and there, and then the rounding of `out` is most of them.
    for len in E::cases([], [], [2500]) {
        let case = Case {
            batch: 1,
            ..case(len)
        };
        let at = |seed| {
            let case = Case {
                seed,
                grad_lse: false,
                ..case.clone()
            };
            let inputs = case.inputs();
            let grads = case.gradients(&inputs);
            (expected(&inputs, &grads), inputs, grads)
        };
        let others = (1..=2).map(|n| at(case.seed.wrapping_add(n << 32)).0);
        let (expected, inputs, grads) = at(case.seed);
        let expected = expected.with_yardsticks(others);
        let call = engine.call(&inputs, case.layout, &grads);
        let grads = engine.backward(&call).expect("a good case").1;
        for (name, grad) in [("dq", &grads.q), ("dk", &grads.k), ("dv", &grads.v)] {
            expected.check_one(name, grad, format!("{} at {case:?}", E::NAME));
        }
    }
    for len in E::cases([33], [300], [3000]) {
        let case = case(len);
        let inputs = case.inputs();
        let grads = Grads::random(&inputs.problem, case.seed).without_lse();
        let call = engine.call(&inputs, case.layout, &grads);
        let run = || {
            let grads = engine.backward(&call).expect("a good case").1;
            [Some(grads.q), Some(grads.k), Some(grads.v), grads.scores]
        };
        let first = run();
        for _ in 0..E::cases([1], [4], [45]).into_iter().sum() {
            assert!(run() == first, "another result of the same call");
        }
    }
}
