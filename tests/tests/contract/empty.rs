//! Tensors without elements have defined results.

use flash_dma_tests::prelude::*;

every_engine!(no_keys, no_queries, no_sequences);

/// Zeros, an LSE of −∞ and zero gradients.
fn no_keys<E: Engine>(engine: &E) {
    for case in [
        Case::new(5, 0),
        Case::new(5, 0).full(),
        Case::new(5, 0).plain(),
    ] {
        case.check(engine);
        let inputs = case.inputs();
        let grads = Grads::of_out(vec![1.0; inputs.q.len()]);
        let call = engine.call(&inputs, Layout::Contiguous, &grads);
        let (outputs, grads) = engine.backward(&call).expect("no keys are fine");
        assert_eq!(outputs.out, vec![0.0; inputs.q.len()]);
        assert_eq!(outputs.lse, vec![f64::NEG_INFINITY; 20]);
        assert_eq!(grads.q, vec![0.0; inputs.q.len()]);
        assert_eq!((grads.k, grads.v), (vec![], vec![]));
    }
}

/// No output, and zero gradients of keys and scores, also where tensor cores compute the problem.
fn no_queries<E: Engine>(engine: &E) {
    let of_tensor_cores = Case::new(0, 9).dim(64).element(F16);
    for case in [Case::new(0, 9), Case::new(0, 9).full(), of_tensor_cores] {
        if !engine.supports(case.element) {
            continue;
        }
        case.check(engine);
        let inputs = case.inputs();
        let grads = Grads::random(&inputs.problem, 1);
        let call = engine.call(&inputs, Layout::Contiguous, &grads);
        let (outputs, grads) = engine.backward(&call).expect("no queries are fine");
        assert_eq!(
            (outputs.out, outputs.lse, grads.q),
            (vec![], vec![], vec![])
        );
        assert_eq!(grads.k, vec![0.0; inputs.k.len()]);
        assert_eq!(grads.v, vec![0.0; inputs.v.len()]);
        assert_eq!(grads.scores, Some(vec![0.0; 2 * 9]));
    }
}

fn no_sequences<E: Engine>(engine: &E) {
    let case = Case {
        batch: 0,
        ..Case::new(4, 6)
    };
    let none = Grads::of_out(Vec::new());
    let call = engine.call(&case.inputs(), Layout::Contiguous, &none);
    let (outputs, grads) = engine.backward(&call).expect("no sequences are fine");
    assert_eq!((outputs.out, grads.scores), (vec![], Some(vec![])));
    let scores = Raw::new(&[], &[2, 3, 0], F32, Layout::Contiguous);
    assert_eq!(engine.select(&scores, 4).expect("no scores are fine"), []);
}
