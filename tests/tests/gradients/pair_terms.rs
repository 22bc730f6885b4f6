//! The sizes, widths and types in which terms that depend on a pair's query and key are tested: dropout, ALiBi.

use flash_dma_tests::prelude::*;

/// Selected keys; `options` gets the number of the case and the query heads.
pub(super) fn selected_keys<E: Engine>(
    engine: &E,
    options: impl Fn(usize, usize, AttentionOptions) -> AttentionOptions,
) {
    for (n, [q_len, k_len]) in E::cases(
        [[17, 40]],
        [[70, 70], [33, 257], [113, 50]],
        [[257, 257], [90, 1023], [700, 700]],
    )
    .into_iter()
    .enumerate()
    {
        // The widths that `wgmma` has in both passes, and one whose gradients are those of `mma`.
        let dim = [64, 128, 96][n % 3];
        let case = Case::new(q_len, k_len).heads(4, 2).dim(dim);
        // A GPU gets six cases: each width in two types.
        let case = case.element([F32, Bf16, F16][(n + n / 3) % 3]);
        let case = case.options(|o| options(n, 4, o.with_causal(n != 1)));
        case.check(engine);
    }
}

/// Query heads that share the rows of a tile; many of them leave it few queries.
pub(super) fn grouped_heads<E: Engine>(
    engine: &E,
    options: impl Fn(usize, usize, AttentionOptions) -> AttentionOptions,
) {
    for (n, [heads, len]) in E::cases([[3, 30]], [[3, 100]], [[6, 300], [8, 1100], [32, 140]])
        .into_iter()
        .enumerate()
    {
        let mut case = Case::new(len, len).heads(heads, 1).dim(64);
        case.batch = 2;
        let case = case.element(Bf16).options(|o| {
            let o = o.with_keep_window(len / 3).with_deterministic(n == 1);
            options(n, heads, o)
        });
        case.check(engine);
    }
}

/// Biases per pair, per query and per key, which have separate kernels; `options` gets the query heads.
pub(super) fn masks_and_biases<E: MaskedEngine>(
    engine: &E,
    options: impl Fn(usize, AttentionOptions) -> AttentionOptions,
) {
    for sizes in E::cases(
        [[2, 2, 1, 9, 20, 8]],
        [[2, 4, 2, 100, 130, 64]],
        [[2, 4, 2, 301, 270, 64]],
    ) {
        let [batch, q_heads, _, q_len, k_len, _] = sizes;
        for (causal, bias) in [
            (true, [1, q_heads, q_len, k_len]),
            (false, [batch, 1, 1, k_len]),
        ] {
            for element in [F32, Bf16] {
                let mut case = MaskedCase::new(sizes).element(element).causal(causal);
                case.options = options(q_heads, case.options);
                let case = case.mask([1, 1, q_len, k_len], Pattern::Random(0.7));
                case.bias(bias).check(engine);
            }
        }
    }
}
