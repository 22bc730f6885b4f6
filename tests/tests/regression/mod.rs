//! One test for each defect that was found, named after what went wrong.

use flash_dma_tests::{Case, Engine, Layout, raw_engines};

raw_engines!(empty_tensors_were_refused_for_their_strides);

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
