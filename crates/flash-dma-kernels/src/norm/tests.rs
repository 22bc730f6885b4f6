//! Rows that several units share, as on a GPU: on cubecl-cpu through shared memory, in place of shuffles.

use crate::norm::blueprint::{LaneSums, NormBlueprint};
use crate::norm::launch::Call;
use crate::norm::{NormGradients, NormParameters};
use crate::testing::{self, Placement, client, read_f64, zeros};
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{ElementType, NormProblem, Rotary};
use flash_dma_reference::Rng;
use flash_dma_reference::compare::{GRADIENT, OUTPUT, compare};
use flash_dma_reference::norm::Norm;

const F32: ElementType = ElementType::F32;

fn upload(values: &[f64], shape: &[usize]) -> TensorBinding {
    testing::upload(&client(), values, shape, F32, Placement::Contiguous)
}

/// Compares both passes with the oracle, with `units` units a cube that share rows in vectors of `vector` elements.
fn check(problem: NormProblem, vector: usize, units: usize) {
    let client = client();
    let inputs = Norm::random(problem, 11);
    let mut rng = Rng::new(12);
    let grad_out: Vec<f64> = (inputs.x.iter())
        .map(|_| f64::from(rng.normal() as f32))
        .collect();
    let parameters = NormParameters {
        gamma: (inputs.gamma.as_ref()).map(|gamma| upload(gamma, &[problem.width])),
        table: (inputs.table.as_ref())
            .zip(problem.table_shape())
            .map(|(table, shape)| upload(table, &shape)),
    };
    let x = upload(&inputs.x, &problem.x_shape());
    let blueprint = NormBlueprint::with(&problem, vector, LaneSums::Shared, units);
    assert_eq!(blueprint.units(), units);
    let call = Call::new(&client, &problem, &parameters, &[&x]).with_vector(vector);
    let agree = |name, shape: &[usize], actual, exact, naive: &[f64], factor| {
        let actual = read_f64(&client, actual, F32);
        let result = compare(name, shape, &actual, exact, naive, F32, factor);
        result.unwrap_or_else(|failure| panic!("{blueprint:?}: {failure}"));
    };

    let out = zeros(&client, &problem.out_shape());
    call.forward(x.clone(), out.clone(), blueprint);
    let (exact, naive) = (inputs.forward(), inputs.naive_forward());
    agree("out", &problem.out_shape(), out, &exact, &naive, OUTPUT);

    let grads = NormGradients {
        x: zeros(&client, &problem.x_shape()),
        gamma: (inputs.gamma.as_ref()).map(|_| zeros(&client, &[problem.width])),
    };
    let x = problem.epsilon.map(|_| x);
    let of_out = upload(&grad_out, &problem.out_shape());
    call.backward(x.clone(), of_out.clone(), None, grads.clone(), blueprint);
    let (exact, naive) = (inputs.backward(&grad_out), inputs.naive_backward(&grad_out));
    let (shape, dx) = (problem.x_shape(), grads.x.clone());
    agree("dx", &shape, dx, &exact.x, &naive.x, GRADIENT);

    // Added to a gradient that x has already.
    let other: Vec<f64> = (naive.x.iter())
        .map(|_| f64::from(rng.normal() as f32))
        .collect();
    let (mut sum, mut naive_sum) = (exact.x.clone(), naive.x.clone());
    for (at, other) in other.iter().enumerate() {
        sum.values[at] += other;
        sum.magnitude[at] += other.abs();
        naive_sum[at] += other;
    }
    let other = Some(upload(&other, &shape));
    call.backward(x, of_out, other, grads.clone(), blueprint);
    agree(
        "dx and another",
        &shape,
        grads.x,
        &sum,
        &naive_sum,
        GRADIENT,
    );
    if let (Some(actual), Some(exact), Some(naive)) = (grads.gamma, &exact.gamma, &naive.gamma) {
        agree("dgamma", &[problem.width], actual, exact, naive, GRADIENT);
    }
}

fn rows(rows: usize, width: usize) -> NormProblem {
    NormProblem::rows(&[rows, width], &[width], F32, 1e-5).expect("a good case")
}

#[test]
fn units_that_share_a_row_agree_with_the_oracle() {
    // One row at a time, with a rest; several at once, some of which do not exist; lanes without features.
    check(rows(2, 520), 4, 2);
    check(rows(3, 4), 4, 2);
    check(rows(3, 3), 1, 4);
    let shape = [2, 1, 3, 8];
    let rotary = Rotary {
        positions: 9,
        start: 4,
    };
    let gamma = [8];
    for norm in [None, Some((&gamma[..], 1e-5))] {
        let problem = NormProblem::heads(&shape, norm, Some(rotary), F32);
        check(problem.expect("a good case"), 1, 4);
    }
    // Several heads at once, in two cubes' worth of rows: four, and three of three; the last token's group is alone.
    for heads in [8, 3] {
        let shape = [1, 5, heads, 16];
        let gamma = [16];
        let norm = Some((&gamma[..], 1e-5));
        let problem = NormProblem::heads(&shape, norm, Some(rotary), F32).expect("a good case");
        let blueprint = NormBlueprint::with(&problem, 2, LaneSums::Shared, 16);
        assert_eq!(blueprint.heads, heads.min(4));
        check(problem, 2, 16);
    }
}

/// Shared memory for the gradients of gamma stays within what every GPU has, whatever the width and the alignment.
#[test]
fn a_cube_fits_every_gpu() {
    let widths = (1..=8192).rev().step_by(97);
    for width in widths.chain([8, 128, 256, 512, 1024, 2048, 4096]) {
        for vector in [1, 2, 4, 8]
            .into_iter()
            .filter(|vector| width % vector == 0)
        {
            for (units, words) in [(256, 10 << 10), (128, 5 << 10)] {
                let sums = LaneSums::Shared;
                let blueprint = NormBlueprint::with(&rows(1, width), vector, sums, units);
                let shared = blueprint.shared_gradients() + blueprint.shared_sums();
                assert!(shared <= words, "{blueprint:?}");
                assert_eq!(blueprint.units(), units);
                assert!(blueprint.features() <= 8192 / units, "{blueprint:?}");
                assert!(blueprint.steps() * blueprint.lanes * blueprint.item >= width);
            }
        }
    }
}
