//! What the tensor-core engines serve, f16 and bf16 with head dimensions in steps of 32, and what makes
//! their kernels differ. Where there are no tensor cores the portable kernels compute the same.

use flash_dma_problem::ElementType::{self, Bf16, F16};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_tests::{Case, Engine, every_engine};

every_engine!(
    head_dims_and_types,
    groups,
    options,
    chunks_of_queries,
    kinds_of_scores,
    not_finite,
    capped_infinite_query,
    deterministic,
);

fn case(q_len: usize, k_len: usize, dim: usize, element: ElementType) -> Case {
    Case::new(q_len, k_len).dim(dim).element(element)
}

fn head_dims_and_types<E: Engine>(engine: &E) {
    for dim in E::cases([32], [64, 128], [96, 192, 256]) {
        for element in [F16, Bf16] {
            for (q_len, k_len) in
                E::cases([(19, 23)], [(113, 257)], [(1, 1), (257, 113), (640, 640)])
            {
                case(q_len, k_len, dim, element).check(engine);
                case(q_len, k_len, dim, element).plain().check(engine);
            }
        }
    }
}

/// Groups that divide the rows of a tile and groups that do not.
fn groups<E: Engine>(engine: &E) {
    for (q_heads, kv_heads) in E::cases(
        [(2, 2)],
        [(3, 1), (8, 2)],
        [(1, 1), (7, 1), (12, 2), (65, 1)],
    ) {
        for (q_len, k_len) in E::cases([(20, 20)], [(150, 150)], [(333, 400)]) {
            let case = case(q_len, k_len, 64, Bf16).heads(q_heads, kv_heads);
            case.check(engine);
            case.plain().check(engine);
        }
    }
}

fn options<E: Engine>(engine: &E) {
    for (q_len, k_len) in E::cases([(21, 33)], [(130, 200)], [(700, 650)]) {
        for element in [F16, Bf16] {
            let case = || case(q_len, k_len, 64, element).heads(4, 1);
            case().full().check(engine);
            case().full().plain().check(engine);
            case().options(|o| o.with_softcap(2.0)).check(engine);
            case()
                .plain()
                .options(|o| o.with_softcap(20.0))
                .check(engine);
            case().options(|o| o.with_scale(-0.3)).check(engine);
            case().deviation(30.0).check(engine);
            case().window(1).check(engine);
        }
    }
}

/// Keys that live over several chunks of queries, and few of them to a chunk.
fn chunks_of_queries<E: Engine>(engine: &E) {
    for (len, window) in E::cases([], [], [(2100, 100), (4099, 1500), (3000, 5)]) {
        for (dim, heads) in [(64, 2), (128, 4)] {
            case(len, len, dim, Bf16)
                .heads(heads, 1)
                .window(window)
                .check(engine);
        }
    }
}

fn kinds_of_scores<E: Engine>(engine: &E) {
    for kind in Scores::ALL {
        for len in E::cases([24], [200], [1500]) {
            case(len, len, 32, Bf16).scores(kind).check(engine);
        }
    }
}

/// NaN in every input, attended to by few, by many and by none; infinities where the sum of a row cannot
/// be told from NaN by the order of its terms.
fn not_finite<E: Engine>(engine: &E) {
    let (nan, infinite) = (f64::NAN, f64::INFINITY);
    let all = [
        (nan, 0, false),
        (nan, 1, false),
        (nan, 2, false),
        (nan, 3, false),
        (nan, 3, true),
        (infinite, 0, false),
        (infinite, 2, false),
    ];
    for (value, which, full) in all {
        for (len, window) in E::cases([(40, 4)], [(150, 20)], [(1200, 30), (1200, 1200)]) {
            let mut case = case(len, len, 64, F16).window(window);
            if full {
                case = case.full();
            }
            let mut inputs = case.inputs();
            let dim = case.head_dim;
            let (mut grad_out, grad_lse) = generate::gradients(&inputs.problem, 1);
            for row in [3, 7, 20, len - 1] {
                match which {
                    0 => inputs.k[row * dim + 5] = value,
                    1 => inputs.v[(len + row) * dim + 11] = value,
                    2 => inputs.q[row * dim + 40] = value,
                    _ => grad_out[row * dim + 63] = value,
                }
            }
            case.check_gradients(engine, &inputs, &grad_out, Some(&grad_lse));
        }
    }
}

/// A softcap makes the logits of an infinite query finite: nothing but its elements tells of it. The keys
/// that it does not see keep every bit of their gradients.
fn capped_infinite_query<E: Engine>(engine: &E) {
    for len in E::cases([40], [150], [1200]) {
        let case = case(len, len, 64, Bf16)
            .window(30)
            .options(|o| o.with_softcap(5.0).with_deterministic(true));
        let mut inputs = case.inputs();
        let (grad_out, _) = generate::gradients(&inputs.problem, 1);
        let run = |inputs: &_| {
            let call = engine.call(inputs, case.layout, (&grad_out, None));
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

/// The right result if a fixed order of sums is asked for, and the same bits every time.
fn deterministic<E: Engine>(engine: &E) {
    let case = |len: usize| {
        case(len, len, 64, Bf16)
            .window(len / 10)
            .options(|o| o.with_deterministic(true))
    };
    for len in E::cases([33], [300], [700]) {
        case(len).check(engine);
    }
    for len in E::cases([33], [300], [3000]) {
        let case = case(len);
        let inputs = case.inputs();
        let (grad_out, _) = generate::gradients(&inputs.problem, case.seed);
        let call = engine.call(&inputs, case.layout, (&grad_out, None));
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
