//! q, k and v, or k and v, of one tensor: the results and the gradients of attention over its parts.

use burn::tensor::{Device, Tensor};
use burn_flash_dma::{
    Attention, MaskedAttention, TensorName, select, split_kv, split_qkv, try_split_kv,
    try_split_qkv,
};
use flash_dma_tests::case::expected;
use flash_dma_tests::prelude::*;
use flash_dma_tests::tensors::{dtype, floats, grad, load, loss, outputs, values};

fast_burn!(
    one_tensor,
    keys_and_values,
    random_problems,
    biases,
    parts_that_others_read,
    parts_of_which_some_are_read,
    nothing_at_all,
    refusals,
);
on_burn_cpu!(one_small_tensor, one_small_pair);

/// Parts `[batch, heads, len, head_dim]` as one tensor `[batch, len, parts, heads, head_dim]`.
fn packed(parts: &[&[f64]], [batch, heads, len, head_dim]: [usize; 4]) -> Vec<f64> {
    let mut all = Vec::new();
    for (b, n) in (0..batch).flat_map(|b| (0..len).map(move |n| (b, n))) {
        for (part, h) in parts
            .iter()
            .flat_map(|part| (0..heads).map(move |h| (part, h)))
        {
            let row = ((b * heads + h) * len + n) * head_dim;
            all.extend(&part[row..row + head_dim]);
        }
    }
    all
}

fn unpacked(all: &[f64], count: usize, shape: [usize; 4]) -> Vec<Vec<f64>> {
    let [batch, heads, len, head_dim] = shape;
    let mut parts = vec![vec![0.0; batch * heads * len * head_dim]; count];
    let places = (0..batch).flat_map(|b| (0..len).map(move |n| (b, n)));
    let places = places.flat_map(|(b, n)| (0..count).map(move |part| (b, n, part)));
    let places = places.flat_map(|(b, n, part)| (0..heads).map(move |h| (b, n, part, h)));
    for (from, (b, n, part, h)) in all.chunks(head_dim).zip(places) {
        let row = ((b * heads + h) * len + n) * head_dim;
        parts[part][row..row + head_dim].copy_from_slice(from);
    }
    parts
}

/// Self-attention of one tensor, or of q and one tensor, by scores, by their intervals, or dense.
fn check<B: Backend>(case: &Case, of_three: bool, burn: &Burn<B>) {
    if burn.lacks(case.element) {
        return;
    }
    let device = burn.device().clone().autodiff();
    let (inputs, p) = (case.inputs(), case.problem());
    let grads = Grads::random(&p, case.seed);
    let [batch, heads, len, head_dim] = p.kv_shape();
    let (q, k, v) = (&inputs.q[..], &inputs.k[..], &inputs.v[..]);
    let parts = if of_three { vec![q, k, v] } else { vec![k, v] };
    let shape = [batch, len, parts.len(), heads, head_dim];
    let all = load::<5>(&packed(&parts, p.kv_shape()), shape, p.element, &device);
    let all = all.require_grad();
    let q = load::<4>(q, p.q_shape(), p.element, &device).require_grad();
    let attention = match of_three {
        true => Attention::from_qkv(all.clone()),
        false => Attention::from_q_kv(q.clone(), all.clone()),
    };
    let attention = attention.options(case.options);
    let scores = inputs.scores.as_ref().map(|z| {
        let z = floats::<3>(z, p.scores_shape(), &device);
        z.require_grad()
    });
    let results = match &scores {
        None => attention.forward_with_lse(),
        Some(z) => {
            let intervals = select(z.clone(), p.window);
            let attention = attention.scores(z.clone()).intervals(&intervals);
            attention.forward_with_lse()
        }
    };
    let actual = loss(&results, &grads).backward();
    let of_parts = all.grad(&actual).expect("tracked");
    assert_eq!(of_parts.dims(), shape);
    assert_eq!(of_parts.dtype(), dtype(p.element));
    let mut gradients = unpacked(&values(of_parts), parts.len(), p.kv_shape());
    if !of_three {
        gradients.insert(0, grad(&q, &actual));
    }
    gradients.extend(scores.map(|z| grad(&z, &actual)));
    let gradients: Vec<_> = gradients.iter().map(|x| &x[..]).collect();
    let outputs = outputs(results);
    let what = format!("{} at {case:?}", Burn::<B>::NAME);
    expected(&inputs, &grads).check(Vec::new, &outputs, &gradients, what);
}

fn one_tensor<B: Backend>(burn: &Burn<B>) {
    for case in [
        Case::new(70, 70).heads(4, 4).window(9),
        Case::new(33, 33).heads(3, 3).scores(Scores::Padded),
        Case::new(40, 40).heads(2, 2).plain(),
        Case::new(40, 40).heads(2, 2).plain().full().dim(64),
        Case::new(1, 1).heads(1, 1),
    ] {
        for element in TYPES {
            check(&case.clone().element(element), true, burn);
        }
    }
}

fn keys_and_values<B: Backend>(burn: &Burn<B>) {
    for case in [
        Case::new(70, 70).heads(8, 2).window(9),
        Case::new(17, 50).heads(4, 1).window(12),
        Case::new(50, 17).heads(2, 2).plain().dim(40),
    ] {
        for element in TYPES {
            check(&case.clone().element(element), false, burn);
        }
    }
}

/// Lengths, heads and windows at random.
fn random_problems<B: Backend>(burn: &Burn<B>) {
    // A GPU compiles for each kind of heads.
    let problems = if B::SIZE == Size::Large { 16 } else { 60 };
    for seed in 0..problems {
        let mut rng = Rng::new(seed);
        let of_three = rng.below(2) == 0;
        let k_len = 1 + rng.below(90);
        let kv_heads = 1 + rng.below(3);
        let (q_len, group) = match of_three {
            true => (k_len, 1),
            false => (1 + rng.below(90), 1 + rng.below(3)),
        };
        let mut case = Case::new(q_len, k_len).heads(kv_heads * group, kv_heads);
        case = case.dim([8, 16, 40][rng.below(3)]);
        case = case.element(TYPES[rng.below(3)]);
        case = match rng.below(3) {
            0 => case.plain(),
            _ => case.window(1 + rng.below(k_len)),
        };
        case.options.causal = rng.below(4) > 0;
        (case.batch, case.seed) = (1 + rng.below(2), seed);
        check(&case, of_three, burn);
    }
}

/// Parts of 64 floats, which begin off the alignment of a GPU, and parts that begin at it.
#[cfg(feature = "cpu")]
fn one_small_tensor<B: Backend>(burn: &Burn<B>) {
    check(&Case::new(9, 9).heads(2, 2).dim(32), true, burn);
}

#[cfg(feature = "cpu")]
fn one_small_pair<B: Backend>(burn: &Burn<B>) {
    check(&Case::new(5, 9).heads(2, 1).dim(8), false, burn);
}

fn biases<B: Backend>(burn: &Burn<B>) {
    for element in burn.supported(TYPES, |&element| element) {
        let case = MaskedCase::new([2, 2, 2, 40, 40, 16]).bias([1, 2, 40, 40]);
        let case = case.causal(true).element(element);
        let device = burn.device().clone().autodiff();
        let (inputs, p) = (case.inputs(), case.problem());
        let grads = Grads::random(&p, case.seed);
        let parts = [&inputs.q[..], &inputs.k, &inputs.v];
        let all = packed(&parts, p.q_shape());
        let all = load::<5>(&all, [2, 40, 3, 2, 16], element, &device).require_grad();
        let bias = inputs.bias.as_ref().expect("a case with a bias");
        let bias = floats::<4>(&bias.values, bias.shape, &device).require_grad();
        let attention = MaskedAttention::from_qkv(all.clone()).bias(bias.clone());
        let results = attention.options(case.options).forward_with_lse();
        let actual = loss(&results, &grads).backward();
        let mut gradients = unpacked(&grad(&all, &actual), 3, p.q_shape());
        gradients.push(grad(&bias, &actual));
        let gradients: Vec<_> = gradients.iter().map(|x| &x[..]).collect();
        let outputs = outputs(results);
        let expected = case.expected(&inputs, &grads);
        let others = || case.others(&inputs, true);
        expected.check(others, &outputs, &gradients, format!("{case:?}"));
    }
}

/// The gradients of the parts by our operation, and by slices.
fn both_ways(
    device: &Device,
    run: impl Fn([Tensor<4>; 3]) -> Tensor<1>,
) -> [(Vec<f64>, Vec<f64>); 2] {
    let case = Case::new(20, 20).heads(2, 2);
    let (inputs, p) = (case.inputs(), case.problem());
    let parts = [&inputs.q[..], &inputs.k, &inputs.v];
    let all = packed(&parts, p.q_shape());
    [true, false].map(|ours| {
        let all = floats::<5>(&all, [2, 20, 3, 2, 16], device).require_grad();
        let inner = all.clone() * 0.5;
        let parts = match ours {
            true => split_qkv(inner),
            false => [0, 1, 2].map(|part| {
                let part = inner.clone().narrow(2, part, 1);
                part.squeeze_dim::<4>(2).swap_dims(1, 2)
            }),
        };
        let loss = run(parts);
        let grads = loss.clone().backward();
        (values(loss), grad(&all, &grads))
    })
}

fn assert_same([ours, slices]: [(Vec<f64>, Vec<f64>); 2]) {
    for (ours, slices) in [(ours.0, slices.0), (ours.1, slices.1)] {
        assert_eq!(ours.len(), slices.len());
        for (a, b) in ours.iter().zip(&slices) {
            assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{a} is not {b}");
        }
    }
}

/// Scores of the values, and a norm of the queries: their gradients come from elsewhere, too.
fn parts_that_others_read<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    for device in [device.clone(), device.gradient_checkpointing()] {
        assert_same(both_ways(&device, |[q, k, v]| {
            let scores = v.clone().mean_dim(3).squeeze_dim::<3>(3);
            let q = q.clone() * q.abs().mean_dim(3);
            Attention::new(q, k, v)
                .scores(scores)
                .forward()
                .powi_scalar(2)
                .sum()
        }));
    }
}

/// Two of them, one, and one twice.
fn parts_of_which_some_are_read<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    assert_same(both_ways(&device, |[q, k, _]| {
        Attention::new(q, k.clone(), k)
            .forward()
            .powi_scalar(2)
            .sum()
    }));
    assert_same(both_ways(&device, |[_, _, v]| v.powi_scalar(2).sum()));
    assert_same(both_ways(&device, |[q, k, v]| {
        let swapped = Attention::new(k.clone(), v.clone(), q.clone()).forward();
        let out = Attention::new(q, k, v).forward();
        (swapped * out).sum()
    }));
}

fn nothing_at_all<B: Backend>(burn: &Burn<B>) {
    let zeros = |shape: [usize; 5]| Tensor::<5>::zeros(shape, burn.device());
    let parts = split_qkv(zeros([2, 0, 3, 4, 8]));
    assert_eq!(parts.map(|part| part.dims()), [[2, 4, 0, 8]; 3]);
    let parts = split_kv(zeros([0, 5, 2, 4, 8]));
    assert_eq!(parts.map(|part| part.dims()), [[0, 4, 5, 8]; 2]);
}

fn refusals<B: Backend>(burn: &Burn<B>) {
    let zeros = |shape: [usize; 5]| Tensor::<5>::zeros(shape, burn.device());
    let refused = |tensor, expected, actual| AttentionError::Shape {
        tensor,
        axis: 2,
        expected,
        actual,
    };
    let qkv = refused(TensorName::PackedQueryKeyValue, 3, 2);
    let error = try_split_qkv(zeros([1, 4, 2, 2, 8])).unwrap_err();
    assert_eq!(error, qkv);
    assert!(
        error.to_string().starts_with("qkv must have size 3"),
        "{error}"
    );
    let error = Attention::try_from_qkv(zeros([1, 4, 2, 2, 8])).unwrap_err();
    assert_eq!(error, qkv);
    let error = MaskedAttention::try_from_qkv(zeros([1, 4, 2, 2, 8])).unwrap_err();
    assert_eq!(error, qkv);
    let kv = refused(TensorName::PackedKeyValue, 2, 3);
    let q = Tensor::<4>::zeros([1, 2, 4, 8], burn.device());
    assert_eq!(try_split_kv(zeros([1, 4, 3, 2, 8])).unwrap_err(), kv);
    let error = Attention::try_from_q_kv(q.clone(), zeros([1, 4, 3, 2, 8])).unwrap_err();
    assert_eq!(error, kv);
    let error = MaskedAttention::try_from_q_kv(q, zeros([1, 4, 3, 2, 8])).unwrap_err();
    assert_eq!(error, kv);
}
