//! SwiGLU against f64, at lengths that vectors divide and that they do not.

use super::{SwigluGradients, swiglu, swiglu_backward};
use crate::testing::{Placement, client, read_f64, upload};
use flash_dma_problem::ElementType;
use flash_dma_reference::Rng;
use flash_dma_reference::round::round;

#[test]
fn both_directions_are_those_of_f64() {
    let client = client();
    // Half of the distance of neighbours, as a share of a number.
    let grains = [
        (ElementType::F32, 6e-8),
        (ElementType::F16, 5e-4),
        (ElementType::Bf16, 4e-3),
    ];
    for (element, grain) in grains {
        for shape in [&[1][..], &[7], &[3, 5, 8], &[64, 33]] {
            let mut rng = Rng::new(9);
            // Gates far from 0 on both sides, too.
            let [gate, up, grad] = [10.0, 1.0, 1.0].map(|scale| {
                let number = |_| round(rng.normal() * scale, element);
                (0..shape.iter().product()).map(number).collect::<Vec<_>>()
            });
            let tensor =
                |values: &[f64]| upload(&client, values, shape, element, Placement::Contiguous);
            let out = || tensor(&vec![9.0; gate.len()]);
            let (out, grads) = (out(), [out(), out()]);
            let [x, y, d] = [&gate, &up, &grad].map(|values| tensor(values));
            swiglu(&client, element, &x, &y, &out).unwrap();
            let again = tensor(&vec![9.0; gate.len()]);
            for out in [Some(&again), None] {
                let [gate, up] = &grads;
                let grads = SwigluGradients::New { gate, up, out };
                swiglu_backward(&client, element, &x, &y, &d, grads).unwrap();
            }
            let [of_gate, of_up] = grads.map(|grad| read_f64(&client, grad, element));
            let [out, again] = [out, again].map(|out| read_f64(&client, out, element));
            assert_eq!(again, out);
            let grads = SwigluGradients::InPlace { again: true };
            swiglu_backward(&client, element, &x, &y, &d, grads).unwrap();
            let over = [x, y, d].map(|tensor| read_f64(&client, tensor, element));
            assert_eq!(over, [of_gate.clone(), of_up.clone(), again]);
            for at in 0..gate.len() {
                let (x, y, d) = (gate[at], up[at], grad[at]);
                let sigmoid = 1.0 / (1.0 + (-x).exp());
                let slope = sigmoid * (1.0 + x * (1.0 - sigmoid));
                let exact = [x * sigmoid * y, d * y * slope, d * x * sigmoid];
                let terms = [x * y, d * y * (1.0 + x.abs()), d * x].map(f64::abs);
                for ((actual, exact), term) in [out[at], of_gate[at], of_up[at]]
                    .into_iter()
                    .zip(exact)
                    .zip(terms)
                {
                    // f16 has no small numbers of full length.
                    let allowed = grain * exact.abs() + 6e-7 * sigmoid.max(0.1) * term + 3e-8;
                    let error = (actual - exact).abs();
                    assert!(
                        error <= allowed,
                        "{element} {shape:?} {at}: {actual}, not {exact}"
                    );
                }
            }
        }
    }
}
