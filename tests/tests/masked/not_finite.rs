//! NaN and infinities reach the pairs that are seen, and no others.

use super::kinds;
use flash_dma_tests::prelude::*;

every_engine!(hidden_pairs_leave_no_trace, not_finite_where_nobody_looks);
matrix_engines!(not_finite_on_tensor_cores);

const BAD: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// Each of keys, values, queries, gradients of `out` and biases in turn, seen by some and not by others.
fn leaves_no_trace<E: MaskedEngine>(engine: &E, case: &MaskedCase, bad: f64, row: usize) {
    let [.., q_len, k_len, dim] = case.sizes;
    for target in 0..5 {
        let mut inputs = case.inputs();
        let mut grads = case.gradients(&inputs);
        let query = row % q_len * dim..(row % q_len + 1) * dim;
        let keys = row % k_len * dim..((row + 2).min(k_len - 1) % k_len + 1) * dim;
        match target {
            0 => inputs.k[keys].fill(bad),
            // One element of a row: others of its vector are numbers.
            1 => inputs.v[keys.start + 3] = bad,
            2 => inputs.q[query.start + 1] = bad,
            3 => grads.out[query].fill(bad),
            _ => {
                grads.lse.as_mut().expect("the case has one")[row % q_len] = bad;
                let bias = inputs.bias.as_mut().expect("the case has one");
                let len = bias.values.len();
                bias.values[3 % len] = bad;
                bias.values[(row + 60) % len] = bad;
            }
        }
        case.check_gradients(engine, &inputs, &grads);
    }
}

fn hidden_pairs_leave_no_trace<E: MaskedEngine>(engine: &E) {
    let case = MaskedCase::new([1, 2, 1, 40, 140, 8])
        .mask([1, 1, 40, 140], Pattern::Window(30))
        .bias([1, 1, 40, 140]);
    for (n, bad) in BAD.into_iter().enumerate() {
        leaves_no_trace(engine, &case, bad, 92 + 7 * n);
    }
}

/// The same in the types and head dimensions that the tensor-core engines take, under windows, whole tiles, and masks
/// in which each query sees few keys of many blocks.
fn not_finite_on_tensor_cores<E: MaskedEngine>(engine: &E) {
    for (dim, bads) in E::cases([], [(64, &BAD[..2])], [(64, &BAD[2..]), (128, &BAD[..])]) {
        for (n, pattern) in [Pattern::Window(75), Pattern::Tiles(32, 64), Pattern::Top(5)]
            .into_iter()
            .enumerate()
        {
            let case = MaskedCase::new([1, 2, 1, 140, 200, dim])
                .element(if dim == 64 { Bf16 } else { F16 })
                .mask([1, 1, 140, 200], pattern)
                .bias([1, 1, 1, 200])
                .causal(n > 0);
            for &bad in bads {
                leaves_no_trace(engine, &case, bad, 66 + n);
            }
        }
    }
}

/// Keys and values that no query sees, and queries and gradients of rows that see nothing.
fn not_finite_where_nobody_looks<E: MaskedEngine>(engine: &E) {
    for (element, dim) in kinds::<E>() {
        let mut case = MaskedCase::new([1, 2, 1, 60, 150, dim])
            .element(element)
            .mask([1, 1, 60, 150], Pattern::Random(0.5))
            .bias([1, 1, 60, 150]);
        case.options.deterministic = true;
        let mut clean = case.inputs();
        let mask = clean.visible.as_mut().expect("the case has one");
        let (unseen, blind) = ([0, 63, 64, 100, 149], [0, 17, 59]);
        for (at, shown) in mask.values.iter_mut().enumerate() {
            *shown &= !unseen.contains(&(at % 150)) && !blind.contains(&(at / 150));
        }
        let grads = case.gradients(&clean);
        let (mut inputs, mut dirty_grads) = (clean.clone(), grads.clone());
        for (n, key) in unseen.into_iter().enumerate() {
            inputs.k[key * dim..(key + 1) * dim].fill(BAD[n % 3]);
            inputs.v[key * dim..(key + 1) * dim].fill(BAD[(n + 1) % 3]);
        }
        for (n, row) in blind.into_iter().enumerate() {
            inputs.q[row * dim..(row + 1) * dim].fill(BAD[n]);
            dirty_grads.out[row * dim..(row + 1) * dim].fill(BAD[n]);
            dirty_grads.lse.as_mut().expect("the case has one")[row] = BAD[n];
        }
        let bias = inputs.bias.as_mut().expect("the case has one");
        for key in unseen {
            bias.values[5 * 150 + key] = f64::NAN;
        }
        bias.values[17 * 150 + 70] = f64::INFINITY;
        case.check_gradients(engine, &inputs, &dirty_grads);
        // In addition, no bit of the result changes.
        let call = |inputs: &_, grads: &Grads| {
            let call = MaskedCall::new(inputs, case.layout, false, grads);
            engine.masked(&call).expect("a good case")
        };
        let (outputs, grads) = call(&clean, &grads);
        let (dirty_outputs, dirty) = call(&inputs, &dirty_grads);
        assert!(outputs.out == dirty_outputs.out && outputs.lse == dirty_outputs.lse);
        assert!(grads.k == dirty.k && grads.v == dirty.v && grads.bias == dirty.bias);
        assert!(grads.q == dirty.q);
    }
}
