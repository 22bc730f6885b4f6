//! The same call produces the same bits, however often it runs and whatever the layout of its tensors.

use super::{bits, named, run};
use flash_dma_tests::prelude::*;

every_engine!(repeats_are_bit_equal, layouts_are_bit_equal);

/// Selection, lists, forward and backward: 50 times on a GPU, where units race.
fn repeats_are_bit_equal<E: Engine>(engine: &E) {
    let case = |len| Case::new(len, len).heads(4, 2);
    let tensor_cores = case(1000).dim(64).element(Bf16);
    for case in E::cases([case(50)], [case(400)], [tensor_cores]) {
        for case in [case.clone(), case.plain()] {
            let case = case.options(|o| o.with_deterministic(true));
            let inputs = case.inputs();
            let first = bits(&run(engine, &inputs));
            for _ in 0..if E::SIZE == Size::Large { 50 } else { 3 } {
                let again = bits(&run(engine, &inputs));
                assert!(first == again, "another result of {case:?}");
            }
        }
    }
}

fn layouts_are_bit_equal<E: Engine>(engine: &E) {
    let inputs = Case::new(40, 55).heads(4, 2).inputs();
    let grads = Grads::random(&inputs.problem, 1);
    let [contiguous, transposed] = [Layout::Contiguous, Layout::Transposed].map(|layout| {
        let call = engine.call(&inputs, layout, &grads);
        bits(&named(engine.backward(&call).expect("a good case")))
    });
    assert!(contiguous == transposed);
}
