//! Tiles: lengths off every tile, tiles that are empty, full and partial, and their counts.

use flash_dma_problem::PlanGeometry;
use flash_dma_tests::prelude::*;

every_engine!(
    odd_lengths_and_both_polarities,
    empty_and_active_tiles_alternate,
    counts_are_exact,
    no_keys_and_no_queries,
);
matrix_engines!(
    odd_lengths_on_tensor_cores: odd_lengths(Bf16, 64, 4),
    odd_lengths_of_wide_heads: odd_lengths(F16, 128, 2),
    tiles_alternate_on_tensor_cores: tiles_alternate(
        [[1, 2, 1, 200, 300, 64], [2, 4, 1, 500, 500, 64]],
        Bf16,
    ),
    tiles_alternate_in_wide_heads: tiles_alternate(
        [[1, 4, 2, 100, 200, 128], [1, 8, 2, 300, 700, 128]],
        F16,
    ),
);

/// Every pair of lengths off every tile.
fn all_odd() -> impl Iterator<Item = (usize, usize)> {
    let odd = [1, 17, 113, 239, 257, 1023];
    (odd.into_iter()).flat_map(move |q_len| odd.map(|k_len| (q_len, k_len)))
}

fn odd_lengths_and_both_polarities<E: MaskedEngine>(engine: &E) {
    let small = [(1, 1), (1, 113), (17, 33), (113, 17), (17, 257)];
    for (q_len, k_len) in E::cases(small, all_odd(), []) {
        for causal in [false, true] {
            let mut case = MaskedCase::new([1, 2, 1, q_len, k_len, 8])
                .mask([1, 2, q_len, k_len], Pattern::Random(0.3))
                .causal(causal)
                .bias([1, 1, 1, k_len]);
            case.hidden = causal;
            case.check(engine);
        }
    }
}

fn odd_lengths<E: MaskedEngine>(engine: &E, element: ElementType, dim: usize, group: usize) {
    let medium = [(17, 113), (239, 257), (257, 113), (113, 1023)];
    for (n, (q_len, k_len)) in E::cases([], medium, all_odd()).into_iter().enumerate() {
        let bias = [[1, 1, 1, k_len], [1, group, q_len, k_len]][n % 2];
        let causal = n % 3 > 0;
        let mut case = MaskedCase::new([1, group, 1, q_len, k_len, dim])
            .element(element)
            .mask([1, 1, q_len, k_len], Pattern::Random(0.3))
            .causal(causal)
            .bias(bias);
        case.hidden = n.is_multiple_of(3);
        case.check(engine);
    }
}

/// Tiles of the plan's block size, of the engines' tile size, and off both; windows, and one key per row.
const PATTERNS: [Pattern; 8] = [
    Pattern::Tiles(16, 64),
    Pattern::Tiles(32, 64),
    Pattern::Tiles(64, 128),
    Pattern::Tiles(128, 32),
    Pattern::Tiles(17, 65),
    Pattern::Tiles(1, 1),
    Pattern::Window(90),
    Pattern::Top(1),
];

fn empty_and_active_tiles_alternate<E: MaskedEngine>(engine: &E) {
    let sizes = E::cases(
        [[1, 2, 1, 70, 150, 8]],
        [[1, 4, 2, 150, 330, 8]],
        [[1, 4, 2, 300, 700, 8]],
    );
    for sizes in sizes {
        let [_, _, heads, q_len, k_len, _] = sizes;
        for pattern in PATTERNS {
            let case = MaskedCase::new(sizes).mask([1, heads, q_len, k_len], pattern);
            case.check(engine);
            case.causal(true).bias([1, 1, q_len, 1]).check(engine);
        }
    }
}

fn tiles_alternate<E: MaskedEngine>(
    engine: &E,
    [medium, large]: [[usize; 6]; 2],
    element: ElementType,
) {
    for sizes in E::cases([], [medium], [large]) {
        let [batch, _, heads, q_len, k_len, _] = sizes;
        for pattern in PATTERNS {
            let case = MaskedCase::new(sizes)
                .element(element)
                .mask([1, heads, q_len, k_len], pattern);
            case.clone().bias([batch, 1, 1, k_len]).check(engine);
            case.causal(true).check(engine);
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
        let case = MaskedCase::new([2, 4, 2, 70, 150, 8])
            .mask(shape, Pattern::Random(0.5))
            .causal(causal);
        let inputs = case.inputs();
        let call = case.call(&inputs);
        let plan = call.problem.plan.expect("there is a mask");
        let counts = engine.counts(&call).expect("a good mask");
        let mask = inputs.visible.as_ref().expect("there is a mask");
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
