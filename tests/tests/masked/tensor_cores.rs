//! Problems of the tensor-core engines, in all kernel variants; without tensor cores on the portable kernels.

use flash_dma_tests::prelude::*;

matrix_engines!(
    any_keys_of_each_kv_head,
    tiles,
    a_window,
    few_keys_of_each_head,
    keys_hidden_from_all,
    rows_that_see_nothing,
    nothing,
    a_bias_alone,
    keys_far_apart: far_apart([
        Some([1, 2, 1, 33, 200, 64]),
        Some([1, 2, 1, 70, 500, 64]),
        Some([1, 4, 4, 300, 900, 64]),
    ]),
    wide_keys_far_apart: far_apart([
        None,
        Some([2, 8, 2, 70, 300, 128]),
        Some([2, 8, 2, 150, 700, 128]),
    ]),
);

fn any_keys_of_each_kv_head<E: MaskedEngine>(engine: &E) {
    for (case, [batch, _, kv_heads, q_len, k_len, _]) in problems::<E>(0) {
        let mut case = case
            .mask([batch, kv_heads, q_len, k_len], Pattern::Random(0.5))
            .bias([1, kv_heads, 1, k_len])
            .causal(true);
        case.options.softcap = Some(4.0);
        case.check(engine);
    }
}

fn tiles<E: MaskedEngine>(engine: &E) {
    for (case, [batch, _, _, q_len, k_len, _]) in problems::<E>(1) {
        let case = case.mask([1, 1, q_len, k_len], Pattern::Tiles(32, 64));
        case.bias([batch, 1, 1, k_len]).check(engine);
    }
}

fn a_window<E: MaskedEngine>(engine: &E) {
    for (case, [batch, _, kv_heads, q_len, k_len, _]) in problems::<E>(2) {
        let case = case.mask([1, 1, q_len, k_len], Pattern::Window(70));
        let case = case.bias([batch, kv_heads, 1, k_len]);
        case.causal(true).check(engine);
    }
}

fn few_keys_of_each_head<E: MaskedEngine>(engine: &E) {
    for (case, [batch, q_heads, _, q_len, k_len, _]) in problems::<E>(3) {
        let case = case.mask([batch, q_heads, q_len, k_len], Pattern::Top(9));
        case.bias([1, 1, 1, k_len]).causal(true).check(engine);
    }
}

fn keys_hidden_from_all<E: MaskedEngine>(engine: &E) {
    for (case, [batch, q_heads, _, _, k_len, _]) in problems::<E>(4) {
        let case = case.mask([batch, 1, 1, k_len], Pattern::Random(0.7));
        case.bias([1, q_heads, 1, k_len]).check(engine);
    }
}

fn rows_that_see_nothing<E: MaskedEngine>(engine: &E) {
    for (case, [_, _, kv_heads, q_len, ..]) in problems::<E>(5) {
        let case = case.mask([1, kv_heads, q_len, 1], Pattern::Random(0.7));
        case.causal(true).check(engine);
    }
}

fn nothing<E: MaskedEngine>(engine: &E) {
    for (case, [_, _, _, q_len, k_len, _]) in problems::<E>(6) {
        let case = case.mask([1, 1, q_len, k_len], Pattern::Nothing);
        case.causal(true).check(engine);
    }
}

fn a_bias_alone<E: MaskedEngine>(engine: &E) {
    for (n, (case, [.., k_len, _])) in problems::<E>(7).into_iter().enumerate() {
        for causal in [false, true] {
            // A GPU compiles kernels for each masking, so it runs one of them for each problem.
            if E::SIZE < Size::Large || causal == n.is_multiple_of(2) {
                let case = case.clone().bias([1, 1, 1, k_len]);
                case.causal(causal).check(engine);
            }
        }
    }
}

/// Head dimensions, types and groups that the tensor-core engines take, off every tile. A GPU compiles for seconds for
/// each, so each test runs two of them there, and each of them runs in some test.
fn problems<E: MaskedEngine>(test: usize) -> Vec<(MaskedCase, [usize; 6])> {
    let problems = E::cases(
        [[1, 2, 1, 33, 100, 64]],
        [[1, 4, 1, 150, 200, 64], [2, 2, 2, 100, 130, 128]],
        [[1, 4, 2, 129, 200, 128], [1, 8, 1, 130, 330, 64]],
    );
    let all = problems.len();
    let case = |(n, sizes): (usize, [usize; 6])| {
        let element = [Bf16, F16][(n + test) % 2];
        (MaskedCase::new(sizes).element(element), sizes)
    };
    let few = |n: usize| E::SIZE < Size::Large || [0, 2].contains(&((n + 2 * test) % all));
    let problems = problems.into_iter().enumerate();
    problems.filter(|&(n, _)| few(n)).map(case).collect()
}

/// Queries of a tile that see few keys of many blocks: all the same keys, some of them, and none.
fn far_apart<E: MaskedEngine>(engine: &E, [small, medium, large]: [Option<[usize; 6]>; 3]) {
    for (n, sizes) in E::cases(small, medium, large).into_iter().enumerate() {
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
            // A GPU compiles kernels for each.
            if E::SIZE == Size::Large && !(n + m).is_multiple_of(2) {
                continue;
            }
            let mut case = MaskedCase::new(sizes)
                .mask(mask, Pattern::Columns(every))
                .element(Bf16);
            case.options.causal = m % 2 == 0;
            case.bias = (m < 2).then_some([1, kv_heads, 1, k_len]);
            case.check(engine);
            // One key that no query sees, and one that some see.
            let mut inputs = case.inputs();
            for key in [7, 3 * every] {
                inputs.v[key * dim..(key + 1) * dim].fill(f64::NAN);
                inputs.k[key * dim + 5] = f64::INFINITY;
            }
            case.check_inputs(engine, &inputs);
        }
    }
}
