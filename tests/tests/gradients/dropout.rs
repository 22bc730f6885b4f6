//! Dropout: outputs and gradients with the mask of a seed, the same on every engine.

use super::pair_terms;
use flash_dma_tests::prelude::*;

every_engine!(
    of_selected_keys,
    of_grouped_heads,
    of_all_keys,
    of_masks_and_biases
);

fn dropout(rate: f32) -> Dropout {
    Dropout::new(rate, 0xfeed_0000_beef).expect("a probability")
}

fn of_selected_keys<E: Engine>(engine: &E) {
    pair_terms::selected_keys(engine, |n, _, o| {
        o.with_dropout(dropout([0.2, 0.5, 0.9][n % 3]))
    });
}

fn of_grouped_heads<E: Engine>(engine: &E) {
    pair_terms::grouped_heads(engine, |_, _, o| o.with_dropout(dropout(0.4)));
}

fn of_all_keys<E: Engine>(engine: &E) {
    for len in E::cases([23], [130], [515, 1030]) {
        let element = if len > 130 { Bf16 } else { F32 };
        let case = Case::new(len, len).heads(2, 2).dim(64).plain();
        let case = case.element(element);
        let case = case.options(|o| o.with_softcap(4.0).with_dropout(dropout(0.1)));
        case.check(engine);
    }
}

fn of_masks_and_biases<E: MaskedEngine>(engine: &E) {
    pair_terms::masks_and_biases(engine, |_, o| o.with_dropout(dropout(0.3)));
}
