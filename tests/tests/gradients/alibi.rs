//! ALiBi: outputs and gradients with slopes of every sign, on every engine.

use flash_dma_problem::AlibiSlopes;
use flash_dma_problem::ElementType::{Bf16, F16, F32};
use flash_dma_tests::masked::{MaskedCase, MaskedEngine, Pattern};
use flash_dma_tests::{Case, Engine, every_engine};

every_engine!(of_selected_keys, of_all_keys, of_masks_and_biases);

/// The first standard ones of `heads` heads, then zero and a negative one.
fn slopes(heads: usize) -> AlibiSlopes {
    let mut slopes = AlibiSlopes::standard(heads).values().to_vec();
    if let [.., zero, negative] = &mut slopes[1..] {
        (*zero, *negative) = (0.0, -0.01);
    }
    AlibiSlopes::new(&slopes).expect("finite slopes")
}

fn of_selected_keys<E: Engine>(engine: &E) {
    for (n, [q_len, k_len]) in E::cases(
        [[17, 40]],
        [[70, 70], [33, 257], [113, 50]],
        [[257, 257], [90, 1023], [700, 700]],
    )
    .into_iter()
    .enumerate()
    {
        let case = Case::new(q_len, k_len).heads(4, 2).dim(64);
        let case = case.element([F32, Bf16, F16][n % 3]);
        case.options(|o| o.with_causal(n != 1).with_alibi(slopes(4)))
            .check(engine);
    }
}

fn of_all_keys<E: Engine>(engine: &E) {
    for len in E::cases([23], [130], [515]) {
        for causal in [true, false] {
            let case = Case::new(len, len).heads(3, 3).dim(64).plain();
            let case = case.options(|o| o.with_causal(causal).with_softcap(4.0));
            case.options(|o| o.with_alibi(slopes(3))).check(engine);
        }
    }
}

/// Biases of pairs, of queries and of keys have kernels of their own.
fn of_masks_and_biases<E: MaskedEngine>(engine: &E) {
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
            let mut case = MaskedCase::new(sizes).element(F32).causal(causal);
            case.options.alibi = Some(slopes(q_heads));
            let case = case.mask([1, 1, q_len, k_len], Pattern::Random(0.7));
            case.bias(bias).check(engine);
        }
    }
}
