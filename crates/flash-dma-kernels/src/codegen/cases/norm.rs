//! Norms of rows, and norm and rotary encoding of heads.

use crate::codegen::cases::{Case, HEADS, case};
use crate::codegen::tensors::tensor;
use crate::{ElementType, NormGradients, NormParameters, NormProblem, Rotary};
use crate::{norm_backward, norm_forward};
use cubecl::client::Client;

const LEN: usize = 32 << 10;
/// Tokens whose features pass 32-bit indices.
const LONG_LEN: usize = 8 << 20;

pub(crate) fn all() -> Vec<Case> {
    use ElementType::{Bf16, F16, F32};
    let mut cases = Vec::new();
    for (name, len, width, element) in [
        ("norm-bf16-1024", LEN, 1024, Bf16),
        ("norm-f16-1024", LEN, 1024, F16),
        ("norm-f32-1024", LEN, 1024, F32),
        ("norm-bf16-4096", LEN, 4096, Bf16),
        ("norm-bf16-8192", LEN, 8192, Bf16),
        ("norm-bf16-1001", LEN, 1001, Bf16),
        ("norm-bf16-1024-64bit", LONG_LEN, 1024, Bf16),
    ] {
        cases.push(case(name.into(), move |client| {
            let problem = NormProblem::rows(&[len, width], &[width], element, 1e-5);
            run(client, problem.expect("a valid problem"));
        }));
    }
    // A layer that computes in 16 bits, and its weights.
    cases.push(case("norm-bf16-1024-gamma-f32".into(), |client| {
        let problem = NormProblem::rows(&[LEN, 1024], &[1024], Bf16, 1e-5);
        run(client, problem.expect("a valid problem").with_gamma(F32));
    }));
    let both = [true, true];
    for (name, head_dim, element, [norm, rotary]) in [
        ("heads-bf16-d64", 64, Bf16, both),
        ("heads-bf16-d128", 128, Bf16, both),
        ("heads-bf16-d256", 256, Bf16, both),
        ("heads-f16-d128", 128, F16, both),
        ("heads-f32-d128", 128, F32, both),
        ("heads-bf16-d128-no-norm", 128, Bf16, [false, true]),
        ("heads-bf16-d128-no-rotary", 128, Bf16, [true, false]),
    ] {
        cases.push(case(name.into(), move |client| {
            let (shape, gamma) = ([1, LEN, HEADS, head_dim], [head_dim]);
            let norm = norm.then_some((&gamma[..], 1e-5));
            let rotary = rotary.then_some(Rotary {
                positions: LEN,
                start: 0,
            });
            let problem = NormProblem::heads(&shape, norm, rotary, element);
            run(client, problem.expect("a valid problem"));
        }));
    }
    cases
}

fn run(client: &Client, problem: NormProblem) {
    let rows = |shape| tensor(client, shape, problem.element.size());
    let gamma = || {
        problem
            .epsilon
            .map(|_| tensor(client, [problem.width], problem.gamma.size()))
    };
    let (x, out) = (rows(problem.x_shape()), rows(problem.out_shape()));
    let parameters = NormParameters {
        gamma: gamma(),
        table: problem.table_shape().map(|shape| tensor(client, shape, 4)),
    };
    norm_forward(client, &problem, x.clone(), &parameters, out.clone()).expect("a valid call");
    let grads = NormGradients {
        x: rows(problem.x_shape()),
        gamma: gamma(),
    };
    let x = problem.epsilon.map(|_| x);
    let backward = |other| {
        let (x, grads) = (x.clone(), grads.clone());
        norm_backward(client, &problem, x, &parameters, out.clone(), other, grads)
    };
    backward(None).expect("a valid call");
    if problem.rotary.is_none() {
        backward(Some(grads.x.clone())).expect("a valid call");
    }
}
