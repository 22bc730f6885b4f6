//! A NaN reaches exactly the results that depend on it: the oracle visits selected pairs only, and the comparison
//! requires NaN where the oracle has NaN and numbers elsewhere.

use flash_dma_tests::prelude::*;

every_engine!(
    nan_in_keys_and_values,
    nan_in_queries,
    nan_in_gradients,
    nan_beside_large_logits,
    infinite_scores
);

/// Rows of `k` and `v`, some attended to by a few queries, some by none.
fn nan_in_keys_and_values<E: Engine>(engine: &E) {
    for element in TYPES {
        for (q_len, k_len) in E::cases([(30, 40)], [(150, 150)], [(700, 1000)]) {
            let case = Case::new(q_len, k_len).window(3).element(element);
            // The values are those of the second sequence.
            let case = Case { batch: 2, ..case };
            let dim = case.head_dim;
            let mut inputs = case.inputs();
            for key in [3, 7, 20, k_len - 1] {
                inputs.k[key * dim] = f64::NAN;
                inputs.v[(k_len + key) * dim + 5] = f64::NAN;
            }
            case.check_inputs(engine, &inputs);
            case.full().check_inputs(engine, &inputs);
        }
    }
}

fn nan_in_queries<E: Engine>(engine: &E) {
    for element in TYPES {
        let case = Case::new(40, 40).window(4).element(element);
        let mut inputs = case.inputs();
        inputs.q[17 * case.head_dim + 2] = f64::NAN;
        case.check_inputs(engine, &inputs);
    }
}

/// NaN in the gradient of one row of `out`, and of another row's LSE; a row that sees nothing may receive NaN and does
/// not propagate it.
fn nan_in_gradients<E: Engine>(engine: &E) {
    for element in TYPES {
        let case = Case::new(50, 40).window(4).element(element);
        let inputs = case.inputs();
        let mut grads = Grads::random(&inputs.problem, 1);
        grads.out[2 * case.head_dim] = f64::NAN;
        grads.out[30 * case.head_dim + 1] = f64::NAN;
        let of_lse = grads.lse.as_mut().expect("random ones");
        (of_lse[3], of_lse[41]) = (f64::NAN, f64::NAN);
        case.check_gradients(engine, &inputs, &grads);
    }
}

/// NaN in rows whose logits are large, and in others of the same tiles.
fn nan_beside_large_logits<E: Engine>(engine: &E) {
    for element in TYPES {
        let case = Case::new(150, 150).dim(64).window(4).element(element);
        let mut inputs = case.inputs();
        // Causal: the first rows have no other keys to select.
        for scores in inputs.scores.iter_mut().flat_map(|all| all.chunks_mut(150)) {
            scores[..40].fill(-200.0);
        }
        let dim = case.head_dim;
        inputs.q[17 * dim + 2] = f64::NAN;
        inputs.q[(150 + 90) * dim] = f64::NAN;
        let mut grads = Grads::random(&inputs.problem, 1);
        grads.out[30 * dim + 1] = f64::NAN;
        grads.out[60 * dim] = f64::NAN;
        case.check_gradients(engine, &inputs, &grads);
    }
}

/// +∞ ranks first, and a query that attends to it computes ∞ − ∞.
fn infinite_scores<E: Engine>(engine: &E) {
    let case = Case::new(40, 40).window(4).scores(Scores::Increasing);
    let mut inputs = case.inputs();
    let scores = inputs.scores.as_mut().expect("the case has scores");
    scores[25] = f64::INFINITY;
    case.check_inputs(engine, &inputs);
}
