//! Gradients of dynamic-mask attention: their properties besides correctness, which every case of `contract` checks.

use flash_dma_reference::select;
use flash_dma_tests::prelude::*;

every_engine!(
    of_out_alone,
    of_lse_alone,
    scores_gather_their_group,
    unselected_keys_have_none,
    central_differences,
);

/// The gradients of a case's own inputs.
fn gradients<E: Engine>(engine: &E, case: &Case, of_out: f64, of_lse: f64) -> Gradients {
    let inputs = case.inputs();
    let mut grads = Grads::random(&inputs.problem, case.seed);
    grads.out.iter_mut().for_each(|g| *g *= of_out);
    (grads.lse.iter_mut().flatten()).for_each(|g| *g *= of_lse);
    let call = engine.call(&inputs, case.layout, &grads);
    engine.backward(&call).expect("a good case").1
}

fn of_out_alone<E: Engine>(engine: &E) {
    let case = Case {
        grad_lse: false,
        ..Case::new(37, 50)
    };
    case.check(engine);
    // An absent gradient is a gradient of zeros.
    let inputs = case.inputs();
    let grads = case.gradients(&inputs);
    let call = engine.call(&inputs, case.layout, &grads);
    let absent = engine.backward(&call).expect("a good case").1;
    let zeros = gradients(engine, &case, 1.0, 0.0);
    assert_eq!((absent.q, absent.k, absent.v), (zeros.q, zeros.k, zeros.v));
    assert_eq!(absent.scores, zeros.scores);
}

/// The LSE does not read the values.
fn of_lse_alone<E: Engine>(engine: &E) {
    let case = Case::new(37, 50);
    let inputs = case.inputs();
    let mut grads = case.gradients(&inputs);
    grads.out.fill(0.0);
    case.check_gradients(engine, &inputs, &grads);
    let grads = gradients(engine, &case, 0.0, 1.0);
    assert!(grads.v.iter().all(|&x| x == 0.0));
    assert!(grads.q.iter().any(|&x| x != 0.0));
}

/// With one query head repeated over its group, the group's gradients are that head's times the group's size.
fn scores_gather_their_group<E: Engine>(engine: &E) {
    let one = Case::new(30, 30).heads(1, 1);
    let four = Case::new(30, 30).heads(4, 1);
    let (small, mut large) = (one.inputs(), four.inputs());
    let (head, batch) = (30 * 16, 2);
    let small_grads = Grads::random(&small.problem, 1).without_lse();
    let mut large_grads = Grads::of_out(vec![0.0; large.q.len()]);
    for row in 0..batch * 4 {
        let from = row / 4 * head..(row / 4 + 1) * head;
        large.q[row * head..(row + 1) * head].copy_from_slice(&small.q[from.clone()]);
        large_grads.out[row * head..(row + 1) * head].copy_from_slice(&small_grads.out[from]);
    }
    (large.k, large.v, large.scores) = (small.k.clone(), small.v.clone(), small.scores.clone());
    let [small, large] = [(small, small_grads), (large, large_grads)].map(|(inputs, grads)| {
        let call = engine.call(&inputs, Layout::Contiguous, &grads);
        engine.backward(&call).expect("a good case").1
    });
    let pairs = [(small.k, large.k), (small.v, large.v)];
    let scores = small.scores.into_iter().zip(large.scores);
    for (one, four) in pairs.into_iter().chain(scores) {
        let size = one.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        for (one, four) in one.iter().zip(&four) {
            assert!((4.0 * one - four).abs() <= 1e-5 * size, "{one} {four}");
        }
    }
}

/// Exactly zero in every type, whatever the keys hold.
fn unselected_keys_have_none<E: Engine>(engine: &E) {
    for element in engine.supported(TYPES, |&element| element) {
        let case = Case::new(60, 60).window(5).scores(Scores::Padded);
        let case = case.element(element);
        let mut inputs = case.inputs();
        let (dim, len) = (case.head_dim, case.k_len);
        let scores = inputs.scores.as_ref().expect("the case has scores");
        let never: Vec<usize> = scores
            .chunks(len)
            .flat_map(|head| select::intervals(head, 5))
            .enumerate()
            .filter_map(|(row, interval)| interval.is_empty().then_some(row))
            .collect();
        assert!(never.len() > 40, "{}", never.len());
        for &row in &never {
            inputs.k[row * dim..(row + 1) * dim].fill(f64::NAN);
            inputs.v[row * dim..(row + 1) * dim].fill(f64::INFINITY);
        }
        case.check_inputs(engine, &inputs);
        let grads = Grads::random(&inputs.problem, 1);
        let call = engine.call(&inputs, case.layout, &grads);
        let grads = engine.backward(&call).expect("a good case").1;
        for row in never {
            let row_of = |x: &[f64]| x[row * dim..(row + 1) * dim].iter().all(|&x| x == 0.0);
            assert!(row_of(&grads.k) && row_of(&grads.v), "row {row}");
            assert_eq!(grads.scores.as_ref().expect("scored")[row], 0.0);
        }
    }
}

/// The engine's own outputs, moved along its own gradient: independent of the oracle.
fn central_differences<E: Engine>(engine: &E) {
    let case = Case::new(12, 15).window(6).options(|o| o.with_softcap(3.0));
    let inputs = case.inputs();
    let incoming = case.gradients(&inputs);
    let grads = gradients(engine, &case, 1.0, 1.0);
    let gradient_of = |which: usize| match which {
        0 => &grads.q,
        1 => &grads.k,
        2 => &grads.v,
        _ => grads.scores.as_ref().expect("the case has scores"),
    };
    for which in 0..4 {
        let direction = gradient_of(which);
        let norm = direction.iter().map(|g| g * g).sum::<f64>().sqrt();
        // The selection is a constant, so it uses the original scores.
        let moved = |step: f64| {
            let mut call = engine.call(&inputs, case.layout, &incoming);
            let target = match which {
                0 => &mut call.q,
                1 => &mut call.k,
                2 => &mut call.v,
                _ => call.scores.as_mut().expect("the case has scores"),
            };
            for (x, g) in target.values.iter_mut().zip(direction) {
                *x += step * g / norm;
            }
            let outputs = engine.forward(&call).expect("a good case");
            let weigh = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
            let of_lse = incoming.lse.as_ref().expect("the case has one");
            weigh(&outputs.out, &incoming.out) + weigh(&outputs.lse, of_lse)
        };
        let step = 0.02;
        let slope = (moved(step) - moved(-step)) / (2.0 * step);
        // f32 sums of some hundred terms over 0.04, and the cube of the step.
        assert!(
            (slope - norm).abs() <= 2e-3 * norm,
            "{which}: {slope} {norm}"
        );
    }
}
