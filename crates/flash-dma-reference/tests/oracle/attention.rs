//! The forward pass against closed-form cases, and the propagation of NaN.

use crate::masked;
use flash_dma_problem::{AttentionOptions, ElementType, Problem};
use flash_dma_reference::compare::{OUTPUT, compare, compare_lse};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::masked::Broadcast;
use flash_dma_reference::{Exact, Inputs};

/// Random inputs of two query heads that share a kv head.
fn inputs(
    [q_len, k_len]: [usize; 2],
    options: AttentionOptions,
    element: ElementType,
    seed: u64,
) -> Inputs {
    let (q, k) = ([1, 2, q_len, 8], [1, 1, k_len, 8]);
    let problem = Problem::new(&q, &k, &k, Some(&k[..3]), element, &options).unwrap();
    generate::inputs(problem, Scores::Normal, 1.0, seed)
}

fn all(values: &[f64], holds: impl Fn(f64) -> bool) -> bool {
    values.iter().all(|&x| holds(x))
}

#[test]
fn zero_queries_average_the_values_by_the_softmax_of_the_scores() {
    let options = AttentionOptions::new().with_keep_window(2);
    let mut inputs = inputs([3, 3], options, ElementType::F32, 1);
    inputs.q.fill(0.0);
    // The weights of keys 0, 1, 2 are 1, 2, 3; the last query keeps the two best.
    inputs.scores = Some(vec![0.0, 2f64.ln(), 3f64.ln()]);
    let forward = inputs.forward();
    let sums = [1.0f64, 3.0, 5.0];
    let weights = [[1.0, 0.0, 0.0], [1.0, 2.0, 0.0], [0.0, 2.0, 3.0]];
    for (i, weights) in weights.iter().enumerate() {
        for d in 0..8 {
            let term = |j: usize| weights[j] / sums[i] * inputs.v[j * 8 + d];
            let expected: f64 = (0..3).map(term).sum();
            assert!((forward.out.values[i * 8 + d] - expected).abs() < 1e-14);
        }
        assert!((forward.lse.values[i] - sums[i].ln()).abs() < 1e-14);
    }
}

#[test]
fn rows_that_see_nothing_are_zero_and_have_zero_gradients() {
    let inputs = inputs([5, 3], AttentionOptions::new(), ElementType::F32, 2);
    let forward = inputs.forward();
    assert!(all(&forward.out.values[..16], |x| x == 0.0));
    assert_eq!(forward.lse.values[..2], [f64::NEG_INFINITY; 2]);
    assert!(all(&forward.lse.values[2..5], f64::is_finite));
    let (mut grad_out, grad_lse) = generate::gradients(&inputs.problem, 2);
    grad_out[..16].fill(f64::NAN);
    let grads = inputs.backward(&grad_out, Some(&grad_lse));
    assert!(all(&grads.q.values[..16], |x| x == 0.0));
    assert!(all(&grads.k.values, f64::is_finite));
}

#[test]
fn nan_reaches_the_rows_that_select_its_key_and_no_other() {
    let options = AttentionOptions::new().with_keep_window(1);
    let mut inputs = inputs([3, 3], options, ElementType::F32, 3);
    inputs.scores = Some(vec![0.0, 1.0, 0.5]);
    // Key 0 is selected only by query 0, key 2 by no query.
    inputs.k[..8].fill(f64::NAN);
    inputs.v[16..].fill(f64::NAN);
    let forward = inputs.forward();
    for h in 0..2 {
        let (first, others) = forward.out.values[h * 24..][..24].split_at(8);
        assert!(all(first, f64::is_nan) && all(others, f64::is_finite));
        assert!(forward.lse.values[h * 3].is_nan());
    }
    let (grad_out, _) = generate::gradients(&inputs.problem, 3);
    let grads = inputs.backward(&grad_out, None);
    assert!(all(&grads.v.values[..8], f64::is_nan));
    assert!(all(&grads.v.values[8..16], f64::is_finite));
    for unselected in [&grads.k.values[16..], &grads.v.values[16..]] {
        assert!(all(unselected, |x| x == 0.0));
    }
    assert_eq!(grads.scores.unwrap().values[2], 0.0);
}

#[test]
fn scores_with_every_key_kept_are_a_bias_on_the_key_axis() {
    let options = AttentionOptions::new().with_softcap(2.0);
    let inputs = inputs([6, 9], options, ElementType::F32, 4);
    let shape = [1, 1, 1, 9];
    let bias = (inputs.scores.clone()).map(|values| Broadcast { shape, values });
    let masked = masked(&inputs, None, bias);
    assert_eq!(inputs.forward().out.values, masked.forward().out.values);
    let (grad_out, grad_lse) = generate::gradients(&inputs.problem, 4);
    let scores = inputs.backward(&grad_out, Some(&grad_lse)).scores.unwrap();
    let bias = masked.backward(&grad_out, Some(&grad_lse)).bias.unwrap();
    assert_eq!(scores.values, bias.values);
}

fn small(element: ElementType) -> Inputs {
    let options = AttentionOptions::new().with_keep_window(11);
    inputs([24, 33], options, element, 5)
}

#[test]
fn the_naive_implementation_has_the_error_of_its_element_type() {
    for (element, error) in [
        (ElementType::F32, 1e-6..1e-5),
        (ElementType::F16, 3e-4..4e-3),
        (ElementType::Bf16, 3e-3..3e-2),
    ] {
        let inputs = small(element);
        let (grad_out, grad_lse) = generate::gradients(&inputs.problem, 5);
        let (exact, naive) = (inputs.forward(), inputs.naive_forward());
        let grads = inputs.backward(&grad_out, Some(&grad_lse));
        let naive_grads = inputs.naive_backward(&grad_out, Some(&grad_lse));
        let worst = |exact: &Exact, naive: &[f64]| {
            let pairs = exact.values.iter().zip(naive);
            pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
        };
        let errors = [
            worst(&grads.q, &naive_grads.q),
            worst(&grads.k, &naive_grads.k),
            worst(&grads.v, &naive_grads.v),
            worst(&grads.scores.unwrap(), &naive_grads.scores.unwrap()),
        ];
        let greatest = errors.into_iter().fold(0.0, f64::max);
        assert!(error.contains(&greatest), "{element}: {greatest:e}");
        let of_out = worst(&exact.out, &naive.out);
        assert!(of_out < error.end, "{element}: {of_out:e}");
        compare_lse(&[1, 2, 24], &naive.lse, &exact.lse).unwrap();
    }
}

#[test]
fn the_comparer_names_the_worst_element() {
    let inputs = small(ElementType::F32);
    let (exact, naive) = (inputs.forward().out, inputs.naive_forward().out);
    let (shape, f32) = (inputs.problem.q_shape(), ElementType::F32);
    let run = |actual: &[f64]| compare("out", &shape, actual, &exact, &naive, f32, OUTPUT);
    run(&naive).unwrap();
    let mut wrong = naive.clone();
    wrong[8] += 2e-5;
    wrong[24 * 8 + 3 * 8 + 5] += 1e-4;
    let failure = run(&wrong).unwrap_err();
    assert_eq!((&failure.index[..], failure.failed), (&[0, 1, 3, 5][..], 2));
    let text = failure.to_string();
    assert!(
        text.contains("out [1, 2, 24, 8]: 2 of 384 elements are wrong"),
        "{text}"
    );
    for bad in [f64::NAN, f64::INFINITY] {
        wrong[17] = bad;
        assert_eq!(run(&wrong).unwrap_err().index, [0, 0, 2, 1]);
    }
    assert!(run(&naive[1..]).is_err());
}

#[test]
fn the_comparer_wants_nan_infinity_and_untouched_zeros_exactly() {
    let options = AttentionOptions::new().with_keep_window(1);
    let f32 = ElementType::F32;
    let mut inputs = inputs([3, 3], options, f32, 6);
    inputs.scores = Some(vec![0.0, 1.0, f64::NEG_INFINITY]);
    inputs.v[0] = f64::NAN;
    let (exact, naive) = (inputs.forward(), inputs.naive_forward());
    let shape = inputs.problem.q_shape();
    let run = |actual: &[f64]| compare("out", &shape, actual, &exact.out, &naive.out, f32, 2.0);
    run(&naive.out).unwrap();
    let mut wrong = naive.out.clone();
    wrong[0] = 0.0;
    assert!(run(&wrong).unwrap_err().exact.is_nan());
    let (grad_out, _) = generate::gradients(&inputs.problem, 6);
    let grads = inputs.backward(&grad_out, None);
    let naive_dk = inputs.naive_backward(&grad_out, None).k;
    let mut dk = naive_dk.clone();
    let shape = inputs.problem.kv_shape();
    let run = |dk: &[f64]| compare("dk", &shape, dk, &grads.k, &naive_dk, f32, 3.0);
    run(&dk).unwrap();
    dk[16] = 1e-30;
    assert_eq!(run(&dk).unwrap_err().bound, 0.0);
    let mut lse = naive.lse.clone();
    compare_lse(&[1, 2, 3], &lse, &exact.lse).unwrap();
    lse[0] = f64::NEG_INFINITY;
    assert!(compare_lse(&[1, 2, 3], &lse, &exact.lse).is_err());
}

#[test]
fn no_keys_give_zeros_and_an_lse_of_minus_infinity() {
    for scored in [false, true] {
        let kv = [2, 2, 0, 8];
        let options = AttentionOptions::new();
        let scores = scored.then_some(&kv[..3]);
        let f32 = ElementType::F32;
        let problem = Problem::new(&[2, 4, 3, 8], &kv, &kv, scores, f32, &options).unwrap();
        let inputs = generate::inputs(problem, Scores::Normal, 1.0, 1);
        let forward = inputs.forward();
        assert_eq!(forward.out.values, vec![0.0; 2 * 4 * 3 * 8]);
        assert_eq!(forward.lse.values, vec![f64::NEG_INFINITY; 2 * 4 * 3]);
        let grads = inputs.backward(&forward.out.values, None);
        assert_eq!(grads.q.values, forward.out.values);
        assert_eq!(grads.scores.map(|z| z.values), scored.then(Vec::new));
    }
}

/// Every bound stays a number, so that the comparison is possible.
#[test]
fn an_infinite_logit_leaves_finite_magnitudes() {
    let infinity = f64::INFINITY;
    for (softcap, k) in [
        (None, -infinity),
        (Some(2.0), -infinity),
        (Some(2.0), infinity),
    ] {
        let mut options = AttentionOptions::new();
        options.softcap = softcap;
        let kv = [1, 1, 3, 8];
        let f32 = ElementType::F32;
        let problem = Problem::new(&[1, 1, 2, 8], &kv, &kv, None, f32, &options).unwrap();
        let mut inputs = generate::inputs(problem, Scores::Normal, 1.0, 1);
        inputs.q.iter_mut().for_each(|q| *q = q.abs());
        inputs.k[8 + 3] = k;
        let forward = inputs.forward();
        assert!(all(&forward.out.values, f64::is_finite));
        let sizes = forward.out.magnitude.iter().chain(&forward.lse.magnitude);
        assert!(sizes.into_iter().all(|&x| x.is_finite() && x < 100.0));
    }
}
