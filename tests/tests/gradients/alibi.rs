//! ALiBi: outputs and gradients with slopes of every sign, on every engine.

use super::pair_terms;
use flash_dma_tests::prelude::*;

every_engine!(of_grouped_heads, of_masks_and_biases);

// Burn takes kernels of its own layouts, which a GPU compiles again: it runs the two above.
raw_engines!(of_selected_keys, of_all_keys);

/// The first standard slopes of `heads` heads, then zero and a negative one.
fn slopes(heads: usize) -> AlibiSlopes {
    let mut slopes = AlibiSlopes::standard(heads).values().to_vec();
    if let [.., zero, negative] = &mut slopes[1..] {
        (*zero, *negative) = (0.0, -0.01);
    }
    AlibiSlopes::new(&slopes).expect("finite slopes")
}

fn of_selected_keys<E: Engine>(engine: &E) {
    pair_terms::selected_keys(engine, |_, heads, o| o.with_alibi(slopes(heads)));
}

/// Every head of a tile has its own slope; with dropout, too.
fn of_grouped_heads<E: Engine>(engine: &E) {
    let dropout = Dropout::new(0.2, 7).expect("a probability");
    pair_terms::grouped_heads(engine, |n, heads, o| {
        o.with_alibi(slopes(heads))
            .with_dropout((n == 0).then_some(dropout))
    });
}

fn of_all_keys<E: Engine>(engine: &E) {
    for (n, len) in E::cases([23], [130], [515]).into_iter().enumerate() {
        for causal in [true, false] {
            let case = Case::new(len, len).heads(3, 3).dim(64).plain();
            let case = case.element([F32, Bf16, F16][n % 3]);
            let case = case.options(|o| o.with_causal(causal).with_softcap(4.0));
            case.options(|o| o.with_alibi(slopes(3))).check(engine);
        }
    }
}

fn of_masks_and_biases<E: MaskedEngine>(engine: &E) {
    pair_terms::masks_and_biases(engine, |heads, o| o.with_alibi(slopes(heads)));
}
