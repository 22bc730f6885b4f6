//! One test for each defect that was found, named after what went wrong.

use flash_dma_problem::ElementType::{Bf16, F16};
use flash_dma_tests::{Case, Engine, Layout, every_engine, raw_engines};

raw_engines!(
    empty_tensors_were_refused_for_their_strides,
    bf16_was_not_compiled_for_a_cpu_without_instructions_for_it,
);
every_engine!(gradients_of_keys_were_lost_where_few_queries_see_them);

/// On CubeCL's CPU runtime, x86-64 without AVX512-BF16: "Symbols not found: [ __truncsfbf2 ]".
fn bf16_was_not_compiled_for_a_cpu_without_instructions_for_it<E: Engine>(engine: &E) {
    Case::new(5, 17).element(Bf16).check(engine);
}

/// Allocators differ in the strides they give a tensor without elements, and none is ever used.
fn empty_tensors_were_refused_for_their_strides<E: Engine>(engine: &E) {
    for case in [Case::new(0, 9), Case::new(9, 0)] {
        let inputs = case.inputs();
        let grad_out = vec![1.0; inputs.q.len()];
        let mut call = engine.call(&inputs, Layout::Contiguous, (&grad_out, None));
        for raw in [&mut call.q, &mut call.k, &mut call.v, &mut call.grad_out] {
            if raw.shape.contains(&0) {
                raw.strides = vec![0, 7, 3, 2];
            }
        }
        let (outputs, grads) = engine.backward(&call).expect("an empty tensor is fine");
        assert!(outputs.out.iter().chain(&grads.k).all(|&x| x == 0.0));
    }
}

/// On tensor cores the grid of the dk/dv kernel had room for the keys that the queries attend to, but its list held
/// every key that some position of the sequence does: where the window prunes and the queries are few, or all stand
/// at the last key, the end of the list was never visited and its gradients stayed 0. Small and large tiles of keys;
/// the last is the shape that was reported.
fn gradients_of_keys_were_lost_where_few_queries_see_them<E: Engine>(engine: &E) {
    let small = [
        Case::new(1, 100).window(64),
        Case::new(9, 100).window(64).full(),
    ];
    let medium = [
        Case::new(1, 500).window(128).dim(128),
        Case::new(40, 250).window(64).full().dim(64),
    ];
    let large = [
        Case::new(3, 700).window(128).full().dim(128),
        Case::new(1000, 1000).window(700).full().dim(64),
        Case::new(64, 1773).window(728).dim(64),
        Case::new(3, 1773)
            .window(728)
            .dim(64)
            .heads(12, 3)
            .options(|o| o.with_scale(1.0)),
    ];
    for (n, case) in E::cases(small, medium, large).into_iter().enumerate() {
        // Each type on small and large tiles.
        let element = if n % 3 == 0 { Bf16 } else { F16 };
        case.element(element).check(engine);
    }
}
