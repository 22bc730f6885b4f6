//! A sink logit, compared with the oracle of a key of zeros that has the logit as its score.

use burn::tensor::{DType, Tensor};
use burn_flash_dma::{Attention, Selector, TensorName, learnable_sink, try_learnable_sink};
use flash_dma_tests::prelude::*;
use flash_dma_tests::tensors::{dtype, floats, grad, loss, rows, values};

fast_burn!(
    a_key_of_zeros,
    runners_up_beside_it: check_runners_up([[40, 5, 3], [90, 16, 16]]),
    one_call_is_two,
    sixteen_bits,
    rows_without_keys_stay_zero,
    nothing_at_all,
    refusals,
);

on_burn_cpu!(few_runners_up: check_runners_up([[12, 3, 2]]));

/// Logits of the heads: nearly all of the weight, some of it, none.
const LOGITS: [f64; 3] = [9.0, 0.5, -9.0];

/// The keys of `[heads, len, width]` without the first key of each head.
fn behind_first(values: &[f64], len: usize, width: usize) -> Vec<f64> {
    let heads = values.chunks(len * width);
    heads.flat_map(|head| &head[width..]).copied().collect()
}

/// Makes the first key of each head one of zeros with the head's logit as its score; `other` changes the other scores.
fn begin_with_zeros(inputs: &mut Inputs, logits: [f64; 3], other: impl Fn(f64) -> f64) {
    let (k_len, width) = (inputs.problem.k_len, inputs.problem.head_dim);
    for rows in [&mut inputs.k, &mut inputs.v] {
        (rows.chunks_mut(k_len * width)).for_each(|head| head[..width].fill(0.0));
    }
    let scores = inputs.scores.as_mut().expect("the case has scores");
    for (row, logit) in scores.chunks_mut(k_len).zip(logits.into_iter().cycle()) {
        row.iter_mut().for_each(|score| *score = other(*score));
        row[0] = logit;
    }
}

/// The gradient of each head's logit, from that of the scores of all keys.
fn of_first(scores: &[f64], k_len: usize) -> [f64; 3] {
    [0, 1, 2].map(|head| {
        let rows = scores.chunks(k_len).skip(head).step_by(3);
        rows.map(|row| row[0]).sum()
    })
}

fn close(what: &str, actual: &[f64], expected: &[f64]) {
    close_to(2e-5, what, actual, expected);
}

fn close_to(tolerance: f64, what: &str, actual: &[f64], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let greatest = expected.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
    for (n, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!(
            (a - e).abs() <= tolerance * greatest,
            "{what}[{n}]: {a}, not {e}"
        );
    }
}

fn a_key_of_zeros<B: Backend>(burn: &Burn<B>) {
    for (q_len, k_len) in [(33, 41), (1, 70), (64, 65)] {
        let case = Case::new(q_len, k_len).heads(3, 3);
        let case = case.options(|options| options.with_keep_window(k_len));
        let mut inputs = case.inputs();
        begin_with_zeros(&mut inputs, LOGITS, |_| 0.0);
        check(burn, &inputs, case.seed, LOGITS, None);
    }
}

/// Checks runners-up for tokens, a window and their number: the key of zeros has the highest score of its head, so it
/// is in every window and counts in the gain of a runner-up.
fn check_runners_up<B: Backend, const N: usize>(burn: &Burn<B>, cases: [[usize; 3]; N]) {
    let logits = [9.0, 0.5, -0.5];
    for [len, window, more] in cases {
        let case = Case::new(len, len + 1).heads(3, 3).window(window + 1);
        let mut inputs = case.inputs();
        begin_with_zeros(&mut inputs, logits, |score| -1.0 - score.abs());
        check(burn, &inputs, case.seed, logits, Some(more));
    }
}

/// Checks attention with the logits over all keys except the first, of zeros; by the scores with `more` runners-up, if
/// given, and then with their gradient.
fn check<B: Backend>(
    burn: &Burn<B>,
    inputs: &Inputs,
    seed: u64,
    logits: [f64; 3],
    more: Option<usize>,
) {
    let (device, p) = (burn.device().clone().autodiff(), inputs.problem);
    let (k_len, width) = (p.k_len, p.head_dim);
    let grads = Grads::random(&p, seed);
    let (grad_out, grad_lse) = grads.parts();
    let exact = inputs.backward(grad_out, grad_lse);
    let forward = inputs.forward();
    let of_bias = exact.scores.expect("the case has scores").values;

    let keys = |rows: &[f64]| {
        let shape = [p.batch, 3, k_len - 1, width];
        floats::<4>(&behind_first(rows, k_len, width), shape, &device).require_grad()
    };
    let q = floats::<4>(&inputs.q, p.q_shape(), &device).require_grad();
    let (k, v) = (keys(&inputs.k), keys(&inputs.v));
    let scores = behind_first(inputs.scores.as_ref().expect("they are there"), k_len, 1);
    let scores = floats::<3>(&scores, [p.batch, 3, k_len - 1], &device).require_grad();
    let sink = floats::<1>(&logits, [3], &device).require_grad();
    let attention = Attention::new(q.clone(), k.clone(), v.clone());
    let results = match more {
        None => {
            let (out, lse) = attention.forward_with_lse();
            learnable_sink(out, lse, sink.clone())
        }
        Some(more) => {
            // The key of zeros takes one place of the window.
            let window = p.window - 1;
            let selector = Selector::top(window).runners_up(more);
            let options = AttentionOptions::new().with_keep_window(window);
            let attention = attention.options(options).scores(scores.clone());
            let intervals = selector.select(scores.clone());
            attention
                .intervals(&intervals)
                .forward_with_sink(sink.clone())
        }
    };
    let actual = loss(&results, &grads).backward();

    close("out", &values(results.0), &forward.out.values);
    close("lse", &values(results.1), &forward.lse.values);
    close("dq", &grad(&q, &actual), &exact.q.values);
    let behind = |values: &[f64]| behind_first(values, k_len, width);
    close("dk", &grad(&k, &actual), &behind(&exact.k.values));
    close("dv", &grad(&v, &actual), &behind(&exact.v.values));
    close("dlogits", &grad(&sink, &actual), &of_first(&of_bias, k_len));
    if let Some(more) = more {
        let rank = inputs.rank_gradient(more, grad_out, grad_lse).values;
        assert!(rank.iter().any(|x| x.abs() > 0.01));
        let both: Vec<f64> = of_bias.iter().zip(&rank).map(|(a, b)| a + b).collect();
        let behind = behind_first(&both, k_len, 1);
        close("dscores", &grad(&scores, &actual), &behind);
    }
}

/// A call with a sink gives the results, and without runners-up the gradients of q, k, v and the logits, of a call
/// followed by the sink.
fn one_call_is_two<B: Backend>(burn: &Burn<B>) {
    let tolerances = [(F32, 2e-5), (F16, 4e-3), (Bf16, 3e-2)];
    for (element, tolerance) in burn.supported(tolerances, |&(element, _)| element) {
        let case = Case::new(50, 50).heads(3, 3).window(9).element(element);
        let (inputs, p) = (case.inputs(), case.problem());
        let grads = Grads::random(&p, case.seed);
        let results = |in_one: bool, is_tracked: bool| {
            let device = match is_tracked {
                true => burn.device().clone().autodiff(),
                false => burn.device().clone(),
            };
            let rows = rows(&p, [&inputs.q, &inputs.k, &inputs.v], &device);
            let [q, k, v] = rows.map(|rows| rows.set_require_grad(is_tracked));
            let scores = inputs.scores.as_ref().expect("the case has scores");
            let scores = floats::<3>(scores, p.scores_shape(), &device);
            let logits = floats::<1>(&LOGITS, [3], &device).set_require_grad(is_tracked);
            let attention = Attention::new(q.clone(), k.clone(), v.clone())
                .intervals(&Selector::top(9).select(scores));
            let (out, lse) = match in_one {
                true => attention.forward_with_sink(logits.clone()),
                false => {
                    let (out, lse) = attention.forward_with_lse();
                    learnable_sink(out, lse, logits.clone())
                }
            };
            assert_eq!((out.dtype(), lse.dtype()), (dtype(element), DType::F32));
            let mut results = vec![values(out.clone()), values(lse.clone())];
            if is_tracked {
                let grads = loss(&(out, lse), &grads).backward();
                results.extend([q, k, v].map(|x| grad(&x, &grads)));
                results.push(grad(&logits, &grads));
            }
            results
        };
        for is_tracked in [false, true] {
            let names = ["out", "lse", "dq", "dk", "dv", "dlogits"];
            let (one, two) = (results(true, is_tracked), results(false, is_tracked));
            assert_eq!(one.len(), if is_tracked { 6 } else { 2 });
            for ((name, one), two) in names.iter().zip(one).zip(two) {
                close_to(tolerance, &format!("{name} of {element}"), &one, &two);
            }
        }
    }
}

fn sixteen_bits<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    for element in burn.supported([F16, Bf16], |&element| element) {
        let dtype = dtype(element);
        let case = Case::new(20, 20).plain().heads(3, 3).element(element);
        let (inputs, p) = (case.inputs(), case.problem());
        let q = floats::<4>(&inputs.q, p.q_shape(), device);
        let k = floats::<4>(&inputs.k, p.kv_shape(), device);
        let logits = floats::<1>(&LOGITS, [3], device);
        let (out, lse) = Attention::new(q, k.clone(), k).forward_with_lse();
        let (wide, _) = learnable_sink(out.clone(), lse.clone(), logits.clone());
        let (half, all) = learnable_sink(out.cast(dtype), lse, logits.cast(dtype));
        assert_eq!((half.dtype(), all.dtype()), (dtype, DType::F32));
        // Out, the factor and the product are rounded.
        for (a, e) in values(half).iter().zip(values(wide)) {
            let bound = 3.0 / 256.0 * e.abs() + 1e-6;
            assert!((a - e).abs() <= bound, "{a}, not {e}");
        }
    }
}

fn rows_without_keys_stay_zero<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    let ones = |heads, len| floats::<4>(&vec![1.0; heads * len * 8], [1, heads, len, 8], &device);
    // Of five queries over three keys the first two see none.
    let k = ones(1, 3).require_grad();
    let logits = floats::<1>(&[0.25], [1], &device).require_grad();
    let (out, lse) = Attention::new(ones(1, 5), k.clone(), k.clone()).forward_with_lse();
    let (out, lse) = learnable_sink(out, lse, logits.clone());
    assert_eq!(values(out.clone())[..16], [0.0; 16]);
    assert_eq!(values(lse.clone())[..2], [0.25; 2]);
    let grads = (out.sum() + lse.narrow(2, 0, 2).sum()).backward();
    let of_k = grad(&k, &grads);
    assert!(of_k.iter().all(|x| x.is_finite()), "{of_k:?}");
    let of_logits = grad(&logits, &grads)[0];
    // Two LSEs are the logit; three outputs of eight elements shrink as it grows.
    assert!(of_logits.is_finite() && of_logits < 2.0, "{of_logits}");
}

fn nothing_at_all<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let out = Tensor::<4>::zeros([2, 3, 0, 8], device);
    let logits = floats::<1>(&LOGITS, [3], device);
    let (out, lse) = learnable_sink(out, Tensor::zeros([2, 3, 0], device), logits);
    assert_eq!((out.dims(), lse.dims()), ([2, 3, 0, 8], [2, 3, 0]));
}

fn refusals<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let refused = |lse: [usize; 3], lse_type: DType, logits: usize| {
        let out = Tensor::<4>::zeros([2, 3, 4, 8], device);
        let lse = Tensor::<3>::zeros(lse, (device, lse_type));
        let logits = Tensor::<1>::zeros([logits], device);
        try_learnable_sink(out, lse, logits).unwrap_err()
    };
    let shape = |error: AttentionError, name: TensorName| {
        assert!(
            matches!(&error, AttentionError::Shape { tensor, .. } if *tensor == name),
            "{error}"
        );
    };
    let rows = || Tensor::<4>::zeros([2, 3, 4, 8], device);
    let intervals = Selector::top(2).select(Tensor::zeros([2, 3, 4], device));
    let attention = || Attention::new(rows(), rows(), rows());
    let logits = Tensor::<1>::zeros([2], device);
    let of_all = attention().try_forward_with_sink(logits.clone());
    shape(of_all.unwrap_err(), TensorName::SinkLogits);
    let of_some = (attention().intervals(&intervals)).try_forward_with_sink(logits);
    shape(of_some.unwrap_err(), TensorName::SinkLogits);
    shape(refused([2, 3, 5], DType::F32, 3), TensorName::Lse);
    shape(refused([2, 3, 4], DType::F32, 2), TensorName::SinkLogits);
    if burn.supports(F16) {
        let error = refused([2, 3, 4], DType::F16, 3);
        let expected = AttentionError::element_type(TensorName::Lse, F32, F16);
        assert_eq!(error, expected);
    }
}
