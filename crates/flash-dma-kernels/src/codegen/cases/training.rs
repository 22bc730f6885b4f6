//! The passes of a training step over single elements, and linear scores.

use crate::codegen::cases::{Case, case};
use crate::codegen::tensors::tensor;
use crate::{AdamWStep, ElementType, LossRows, ParameterUpdate, SQUARE_SUMS};
use crate::{SwigluGradients, swiglu, swiglu_backward};
use crate::{adamw, add_squares, linear_scores, linear_scores_gradient, scale};
use crate::{losses, losses_gradient};
use cubecl::client::Client;

const LEN: usize = 32 << 10;
const WIDTH: usize = 1024;
/// Tokens whose features pass 32-bit indices.
const LONG_LEN: usize = 8 << 20;

pub(crate) fn all() -> Vec<Case> {
    use ElementType::{Bf16, F16, F32};
    let mut cases = Vec::new();
    for (name, len, element) in [
        ("training-f32", LEN, F32),
        ("training-f16", LEN, F16),
        ("training-bf16", LEN, Bf16),
        ("training-bf16-64bit", LONG_LEN, Bf16),
    ] {
        cases.push(case(name.into(), move |client| {
            elements(client, len, element);
            scores(client, len, element);
            cross_entropy(client, len, element);
        }));
    }
    cases
}

fn elements(client: &Client, len: usize, element: ElementType) {
    let x = || tensor(client, [len, WIDTH], element.size());
    let update = |new| ParameterUpdate {
        parameter: x(),
        gradient: x(),
        moment_1: x(),
        moment_2: x(),
        new,
    };
    let step = AdamWStep {
        rate: 1e-3,
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-5,
        weight_decay: 1e-4,
        time: 1,
    };
    let factor = tensor(client, [1], 4);
    let updates = [None, None, Some(x())].map(update);
    adamw(client, element, &step, &updates, &factor).expect("a valid call");
    scale(client, element, &x(), &factor, &x()).expect("a valid call");
    let sums = tensor(client, [SQUARE_SUMS], 4);
    add_squares(client, element, &[x(), x()], &sums).expect("a valid call");
    swiglu(client, element, &x(), &x(), &x()).expect("a valid call");
    let grads = [(); 3].map(|()| x());
    let [gate, up, out] = &grads;
    for grads in [
        SwigluGradients::InPlace { again: true },
        SwigluGradients::New {
            gate,
            up,
            out: None,
        },
        SwigluGradients::New {
            gate,
            up,
            out: Some(out),
        },
    ] {
        swiglu_backward(client, element, &x(), &x(), &x(), grads).expect("a valid call");
    }
}

fn scores(client: &Client, len: usize, element: ElementType) {
    let heads = 2;
    let x = tensor(client, [1, len, WIDTH], element.size());
    let directions = tensor(client, [heads, WIDTH], 4);
    let out = tensor(client, [1, heads, len], 4);
    linear_scores(client, element, &x, &directions, &out).expect("a valid call");
    linear_scores_gradient(client, element, &x, &out, &directions).expect("a valid call");
}

fn cross_entropy(client: &Client, len: usize, element: ElementType) {
    let logits = tensor(client, [len, WIDTH], element.size());
    let of_rows = || tensor(client, [len], 4);
    let rows = LossRows {
        element,
        logits: logits.clone(),
        targets: of_rows(),
        normaliser: tensor(client, [len, 2], 4),
    };
    losses(client, &rows, &of_rows()).expect("a valid call");
    for grad_logits in [None, Some(&logits)] {
        losses_gradient(client, &rows, &of_rows(), grad_logits).expect("a valid call");
    }
}
