//! What the tensor-core engines serve, and what makes their kernels differ. Where there are none the portable
//! kernels compute the same.

use flash_dma_problem::ElementType;
use flash_dma_tests::every_engine;
use flash_dma_tests::masked::{MaskedCase, MaskedEngine, Pattern};

every_engine!(
    what_tensor_cores_serve,
    what_tensor_cores_serve_of_other_groups,
    keys_far_apart,
);

/// Head dimensions, types, groups and shapes of masks and biases that the tensor-core engines take, off every tile.
fn what_tensor_cores_serve<E: MaskedEngine>(engine: &E) {
    serves(
        engine,
        E::cases(
            [[1, 2, 1, 33, 100, 64]],
            [[1, 4, 1, 150, 200, 64]],
            [[1, 4, 2, 129, 200, 128]],
        ),
    );
}

/// More of them: the test of all compiles longer than it may.
fn what_tensor_cores_serve_of_other_groups<E: MaskedEngine>(engine: &E) {
    serves(
        engine,
        E::cases([], [[2, 2, 2, 100, 130, 128]], [[1, 8, 1, 130, 330, 64]]),
    );
}

/// Holds every shape of mask and bias to the oracle.
fn serves<E: MaskedEngine>(engine: &E, problems: Vec<[usize; 6]>) {
    for (n, sizes) in problems.into_iter().enumerate() {
        let [batch, q_heads, kv_heads, q_len, k_len, _] = sizes;
        for (m, (mask, pattern)) in [
            ([batch, kv_heads, q_len, k_len], Pattern::Random(0.5)),
            ([1, 1, q_len, k_len], Pattern::Tiles(32, 64)),
            ([1, 1, q_len, k_len], Pattern::Window(70)),
            ([batch, q_heads, q_len, k_len], Pattern::Top(9)),
            ([batch, 1, 1, k_len], Pattern::Random(0.7)),
            ([1, kv_heads, q_len, 1], Pattern::Random(0.7)),
            ([1, 1, q_len, k_len], Pattern::Nothing),
        ]
        .into_iter()
        .enumerate()
        {
            let element = [ElementType::Bf16, ElementType::F16][(n + m) % 2];
            let mut case = MaskedCase::new(sizes).mask(mask, pattern).element(element);
            case.options.causal = m % 3 != 1;
            case.options.softcap = (m == 0).then_some(4.0);
            case.bias = match m {
                0 => Some([1, kv_heads, 1, k_len]),
                1 => Some([batch, 1, 1, k_len]),
                2 => Some([batch, kv_heads, 1, k_len]),
                3 => Some([1, 1, 1, k_len]),
                4 => Some([1, q_heads, 1, k_len]),
                _ => None,
            };
            case.check(engine);
        }
        for causal in [false, true] {
            let mut case = MaskedCase::new(sizes).bias([1, 1, 1, k_len]);
            case.options.causal = causal;
            case.element(ElementType::Bf16).check(engine);
        }
    }
}

/// Queries of a tile that see few keys of many blocks: all the same keys, some of them, and none.
fn keys_far_apart<E: MaskedEngine>(engine: &E) {
    let problems = E::cases(
        [[1, 2, 1, 33, 200, 64]],
        [[1, 2, 1, 70, 500, 64]],
        [[2, 8, 2, 150, 700, 128], [1, 4, 4, 300, 900, 64]],
    );
    for sizes in problems {
        let [batch, q_heads, kv_heads, q_len, k_len, dim] = sizes;
        for (m, (mask, every)) in [
            ([1, 1, q_len, k_len], 3),
            ([batch, kv_heads, q_len, k_len], 11),
            ([1, q_heads, q_len, k_len], 5),
            ([1, kv_heads, 1, k_len], 4),
        ]
        .into_iter()
        .enumerate()
        {
            let mut case = MaskedCase::new(sizes)
                .mask(mask, Pattern::Columns(every))
                .element(ElementType::Bf16);
            case.options.causal = m % 2 == 0;
            case.bias = (m < 2).then_some([1, kv_heads, 1, k_len]);
            case.check(engine);
            // One key that nobody sees, and one that some see.
            let mut inputs = case.inputs();
            for key in [7, 3 * every] {
                inputs.v[key * dim..(key + 1) * dim].fill(f64::NAN);
                inputs.k[key * dim + 5] = f64::INFINITY;
            }
            case.check_inputs(engine, &inputs);
        }
    }
}
