//! The components of a row of logits: the options, biases of −∞, and rows that see nothing.

use super::kinds;
use flash_dma_tests::prelude::*;

every_engine!(
    rows_that_see_nothing,
    biases_of_minus_infinity,
    options_and_types,
    the_softcap_comes_before_the_bias,
    a_softcap_far_above_the_logits,
    gradients_of_the_lse,
);

const NONE: f64 = f64::NEG_INFINITY;

/// Zeros, an LSE of −∞ and zero gradients: of all rows, and of rows next to others that see keys.
fn rows_that_see_nothing<E: MaskedEngine>(engine: &E) {
    for (element, dim) in kinds::<E>() {
        nothing_is_seen(engine, element, dim);
    }
}

fn nothing_is_seen<E: MaskedEngine>(engine: &E, element: ElementType, dim: usize) {
    let nothing = MaskedCase::new([1, 2, 1, 40, 70, dim])
        .element(element)
        .mask([1, 1, 40, 70], Pattern::Nothing)
        .bias([1, 1, 1, 70]);
    nothing.check(engine);
    let (outputs, grads) = engine
        .masked(&nothing.call(&nothing.inputs()))
        .expect("a good case");
    assert!(outputs.lse.iter().all(|&x| x == NONE));
    let bias = grads.bias.expect("there is a bias");
    let all = [outputs.out, grads.q, grads.k, grads.v, bias].concat();
    assert!(all.iter().all(|&x| x == 0.0));
    // By a mask of rows; causal masking hides the first of them from more.
    let rows = MaskedCase::new([1, 2, 1, 70, 40, dim])
        .element(element)
        .mask([1, 2, 70, 1], Pattern::Random(0.7));
    rows.check(engine);
    let rows = rows.causal(true);
    rows.clone().bias([1, 1, 1, 40]).check(engine);
    rows.bias([1, 2, 70, 40]).check(engine);
}

/// A bias of −∞ hides its pair as a mask does: alone, of a key from all, and of all keys of a row.
fn biases_of_minus_infinity<E: MaskedEngine>(engine: &E) {
    for (element, dim) in kinds::<E>() {
        let sizes = [1, 2, 1, 40, 140, dim];
        for causal in [false, true] {
            for mask in [None, Some([1, 1, 40, 140])] {
                let mut case = MaskedCase::new(sizes).element(element).causal(causal);
                case.mask = mask.map(|shape| (shape, Pattern::Random(0.5)));
                let set = |shape: [usize; 4], hidden: &dyn Fn(usize) -> bool| {
                    let case = case.clone().bias(shape);
                    let mut inputs = case.inputs();
                    let bias = inputs.bias.as_mut().expect("the case has one");
                    for (at, x) in bias.values.iter_mut().enumerate() {
                        if hidden(at) {
                            *x = NONE;
                        }
                    }
                    case.check_inputs(engine, &inputs);
                };
                set([1, 1, 1, 140], &|key| key % 3 == 0 || key / 64 == 1);
                set([1, 1, 1, 140], &|_| true);
                set([1, 2, 40, 140], &|at| at % 5 == 0 || at / 140 % 40 < 20);
            }
        }
    }
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

/// Biases far past the cap: capped with the product they would all be the same.
fn the_softcap_comes_before_the_bias<E: MaskedEngine>(engine: &E) {
    for (element, dim) in kinds::<E>() {
        for bias in [[1, 1, 1, 100], [1, 2, 30, 100]] {
            let mut case = MaskedCase::new([1, 2, 1, 30, 100, dim])
                .element(element)
                .mask([1, 1, 30, 100], Pattern::Random(0.5))
                .bias(bias);
            case.options.softcap = Some(0.5);
            case.deviation = 3.0;
            let mut inputs = case.inputs();
            let bias = inputs.bias.as_mut().expect("the case has one");
            bias.values.iter_mut().for_each(|x| *x *= 4.0);
            case.check_inputs(engine, &inputs);
        }
    }
}

/// The hyperbolic tangent is then nearly its argument, and has to be accurate to the last bits.
fn a_softcap_far_above_the_logits<E: MaskedEngine>(engine: &E) {
    for (element, dim) in kinds::<E>() {
        for (softcap, deviation) in [(50.0, 0.1), (50.0, 1.0), (1000.0, 1.0)] {
            let mut case = MaskedCase::new([1, 4, 2, 60, 11, dim])
                .element(element)
                .mask([1, 1, 60, 11], Pattern::Random(0.7))
                .bias([1, 1, 1, 11]);
            case.options.softcap = Some(softcap);
            case.deviation = deviation;
            case.check(engine);
        }
    }
}

/// The gradient of the LSE alone, of `out` alone, and of both, also at rows that see nothing.
fn gradients_of_the_lse<E: MaskedEngine>(engine: &E) {
    for (element, dim) in kinds::<E>() {
        let case = MaskedCase::new([1, 4, 2, 50, 90, dim])
            .element(element)
            .mask([1, 2, 50, 1], Pattern::Random(0.8))
            .bias([1, 4, 1, 90])
            .causal(true);
        let inputs = case.inputs();
        let grads = case.gradients(&inputs);
        let of_lse = Grads {
            out: vec![0.0; grads.out.len()],
            ..grads.clone()
        };
        for grads in [of_lse, grads.clone().without_lse(), grads] {
            case.check_gradients(engine, &inputs, &grads);
        }
    }
}
