//! Attention under masks and biases, against the oracle.

use flash_dma_problem::{ElementType, PlanGeometry};
use flash_dma_tests::masked::{MaskedCase, MaskedEngine, Pattern};
use flash_dma_tests::{Size, masked_engines};

masked_engines!(
    every_broadcast_of_mask_and_bias,
    odd_lengths_and_both_polarities,
    empty_and_active_tiles_alternate,
    rows_that_see_nothing,
    options_and_types,
    hidden_pairs_leave_no_trace,
    the_grid_of_the_reference,
    counts_are_exact,
    no_keys_and_no_queries,
    what_tensor_cores_serve,
    not_finite_on_tensor_cores,
);

const TYPES: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];

/// Every shape that broadcasts to `[batch, q_heads, q_len, k_len]`.
fn broadcasts([batch, q_heads, kv_heads, q_len, k_len, _]: [usize; 6]) -> Vec<[usize; 4]> {
    let mut shapes = Vec::new();
    for b in [1, batch] {
        for h in [1, kv_heads, q_heads] {
            for q in [1, q_len] {
                shapes.extend([1, k_len].map(|k| [b, h, q, k]));
            }
        }
    }
    shapes.sort_unstable();
    shapes.dedup();
    shapes
}

fn every_broadcast_of_mask_and_bias<E: MaskedEngine>(engine: &E) {
    let grids = E::cases(
        [[2, 4, 2, 19, 70, 8]],
        [[2, 2, 2, 19, 70, 8], [2, 4, 1, 40, 70, 16]],
        [[2, 4, 2, 60, 90, 32]],
    );
    for sizes in grids {
        let shapes = broadcasts(sizes);
        for (n, &shape) in shapes.iter().enumerate() {
            // Each shape as mask and as bias, beside another one of the other.
            let other = shapes[(5 * n + 3) % shapes.len()];
            let causal = n.is_multiple_of(2);
            let mut case = MaskedCase::new(sizes)
                .mask(shape, Pattern::Random(0.6))
                .bias(other);
            case.options.causal = causal;
            case.check(engine);
            if E::SIZE > Size::Small {
                let mut case = MaskedCase::new(sizes).bias(shape);
                case.options.causal = !causal;
                case.check(engine);
            }
        }
    }
}

fn odd_lengths_and_both_polarities<E: MaskedEngine>(engine: &E) {
    let lengths = E::cases(
        [(1, 1), (17, 33)],
        [(1, 113), (113, 1), (65, 239), (239, 65), (257, 257)],
        [(1, 1023), (1023, 257), (1023, 1023)],
    );
    for (q_len, k_len) in lengths {
        for causal in [false, true] {
            let mut case = MaskedCase::new([1, 2, 1, q_len, k_len, 16])
                .mask([1, 2, q_len, k_len], Pattern::Random(0.3))
                .bias([1, 1, 1, k_len]);
            case.options.causal = causal;
            case.hidden = causal;
            case.check(engine);
        }
    }
}

fn empty_and_active_tiles_alternate<E: MaskedEngine>(engine: &E) {
    let sizes = E::cases(
        [[1, 2, 1, 70, 150, 8]],
        [[1, 4, 2, 300, 600, 32]],
        [[1, 4, 2, 200, 700, 64]],
    );
    for sizes in sizes {
        let [_, _, heads, q_len, k_len, _] = sizes;
        let shape = [1, heads, q_len, k_len];
        for pattern in [Pattern::Tiles, Pattern::Window(90), Pattern::Top(1)] {
            let case = MaskedCase::new(sizes).mask(shape, pattern);
            case.check(engine);
            case.causal().bias([1, 1, q_len, 1]).check(engine);
        }
    }
}

/// Zeros, an LSE of −∞ and zero gradients, even where others of the tile see keys.
fn rows_that_see_nothing<E: MaskedEngine>(engine: &E) {
    let sizes = [1, 2, 1, 40, 70, 8];
    let nothing = MaskedCase::new(sizes)
        .mask([1, 1, 40, 70], Pattern::Nothing)
        .bias([1, 1, 1, 70]);
    nothing.check(engine);
    let (outputs, grads) = engine.masked(&nothing.call()).expect("a good case");
    assert!(outputs.lse.iter().all(|&x| x == f64::NEG_INFINITY));
    let all = [outputs.out, grads.q, grads.k, grads.v, grads.bias.unwrap()].concat();
    assert!(all.iter().all(|&x| x == 0.0));
    // A third of the rows, by a mask of rows; causal masking hides the first of them from more.
    let rows = MaskedCase::new([1, 2, 1, 70, 40, 8]).mask([1, 2, 70, 1], Pattern::Random(0.7));
    rows.check(engine);
    rows.causal().bias([1, 2, 70, 40]).check(engine);
}

fn options_and_types<E: MaskedEngine>(engine: &E) {
    for element in TYPES {
        for softcap in [None, Some(2.0)] {
            let mut case = MaskedCase::new([1, 4, 2, 70, 130, 32])
                .mask([1, 2, 70, 130], Pattern::Random(0.5))
                .bias([1, 2, 1, 130])
                .element(element);
            case.options.softcap = softcap;
            case.options.scale = Some(0.3);
            case.check(engine);
        }
    }
}

/// NaN and infinities of keys, values, queries, gradients and biases reach the visible pairs alone.
fn hidden_pairs_leave_no_trace<E: MaskedEngine>(engine: &E) {
    let case = MaskedCase::new([1, 2, 1, 40, 140, 16])
        .mask([1, 1, 40, 140], Pattern::Window(30))
        .bias([1, 1, 40, 140]);
    for (n, bad) in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY]
        .into_iter()
        .enumerate()
    {
        for target in 0..4 {
            let mut call = case.call();
            let inputs = &mut call.inputs;
            let row = 16 * (5 + 7 * n);
            match target {
                0 => inputs.k[row + 16 * 90..row + 16 * 92].fill(bad),
                1 => inputs.v[row + 16 * 90..row + 16 * 92].fill(bad),
                2 => inputs.q[row..row + 16].fill(bad),
                _ => call.grad_out[row..row + 16].fill(bad),
            }
            case.check_call(engine, &call);
        }
        // A bias that is read by nobody, and one that is.
        let mut call = case.call();
        let bias = call.inputs.bias.as_mut().expect("the case has one");
        bias.values[3] = bad;
        bias.values[100 + n] = bad;
        case.check_call(engine, &call);
    }
}

/// The reference's own grid of shapes, with the tolerance of this project.
fn the_grid_of_the_reference<E: MaskedEngine>(engine: &E) {
    let lengths = E::cases([], [128, 256], [512]);
    for len in lengths {
        for dim in [32, 64, 96, 128, 192, 256] {
            if dim * len > E::cases([], [64 * 256], [128 * 512]).pop().unwrap_or(0) {
                continue;
            }
            for (causal, element) in [(true, ElementType::Bf16), (false, ElementType::F16)] {
                let mut case = MaskedCase::new([1, 2, 1, len, len, dim])
                    .mask([1, 1, len, len], Pattern::Top(len / 2))
                    .bias([1, 1, 1, len])
                    .element(element);
                case.options.causal = causal;
                case.check(engine);
            }
        }
    }
}

/// Every count of a plan, against the mask itself.
fn counts_are_exact<E: MaskedEngine>(engine: &E) {
    for (shape, causal) in [
        ([2, 2, 70, 150], true),
        ([1, 1, 70, 150], false),
        ([1, 4, 1, 150], true),
        ([2, 1, 70, 1], true),
        ([1, 1, 1, 1], true),
    ] {
        let mut case = MaskedCase::new([2, 4, 2, 70, 150, 8]).mask(shape, Pattern::Random(0.5));
        case.options.causal = causal;
        let call = case.call();
        let plan = call.problem().plan.expect("there is a mask");
        let counts = engine.counts(&call);
        let mask = call.inputs.visible.as_ref().expect("there is a mask");
        let [b, h, query_blocks, key_blocks] = plan.counts_shape();
        let mut expected = vec![0; b * h * query_blocks * key_blocks];
        for row in 0..b * h {
            for i in 0..70 {
                for j in 0..150 {
                    let at = |n: usize, size: usize| if size == 1 { 0 } else { n };
                    let entry = (row * shape[2] + at(i, shape[2])) * shape[3] + at(j, shape[3]);
                    let block = (row * query_blocks + i / PlanGeometry::QUERY_BLOCK) * key_blocks
                        + j / PlanGeometry::KEY_BLOCK;
                    let seen = !causal || j <= i + 80;
                    expected[block] += u32::from(mask.values[entry] && seen);
                }
            }
        }
        assert_eq!(counts, expected, "{case:?}");
    }
}

fn no_keys_and_no_queries<E: MaskedEngine>(engine: &E) {
    for (batch, q_len, k_len) in [(1, 5, 0), (1, 0, 5), (0, 5, 5)] {
        let sizes = [batch, 2, 1, q_len, k_len, 8];
        MaskedCase::new(sizes)
            .mask([batch, 1, q_len, k_len], Pattern::Random(0.5))
            .bias([1, 1, 1, k_len])
            .check(engine);
    }
}

/// Head dimensions, types, groups and shapes of masks and biases that the tensor-core engines take, off every tile.
fn what_tensor_cores_serve<E: MaskedEngine>(engine: &E) {
    let problems = E::cases(
        [[1, 2, 1, 33, 100, 64]],
        [[1, 4, 1, 150, 200, 64], [2, 2, 2, 100, 130, 128]],
        [[1, 4, 2, 129, 200, 128], [1, 8, 1, 130, 330, 64]],
    );
    for (n, sizes) in problems.into_iter().enumerate() {
        let [batch, q_heads, kv_heads, q_len, k_len, _] = sizes;
        for (m, (mask, pattern)) in [
            ([batch, kv_heads, q_len, k_len], Pattern::Random(0.5)),
            ([1, 1, q_len, k_len], Pattern::Tiles),
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

/// As `hidden_pairs_leave_no_trace`, in the types and head dimensions that the tensor-core engines take.
fn not_finite_on_tensor_cores<E: MaskedEngine>(engine: &E) {
    let case = MaskedCase::new([1, 2, 1, 140, 200, 64])
        .mask([1, 1, 140, 200], Pattern::Window(75))
        .bias([1, 1, 1, 200])
        .element(ElementType::Bf16);
    for bad in [f64::NAN, f64::INFINITY] {
        for target in 0..4 {
            let mut call = case.call();
            let inputs = &mut call.inputs;
            let row = 64 * 66;
            match target {
                0 => inputs.k[row..row + 64].fill(bad),
                1 => inputs.v[row..row + 64].fill(bad),
                2 => inputs.q[row..row + 64].fill(bad),
                _ => call.grad_out[row..row + 64].fill(bad),
            }
            case.check_call(engine, &call);
        }
    }
}
