//! Parts of an attention over disjoint keys, merged, against the oracle of one call over all keys.

use burn::tensor::{Bool, DType, Tensor, TensorData};
use burn_flash_dma::{
    Attention, AttentionMask, MaskedAttention, TensorName, TilePlan, merge_attention,
    try_merge_attention,
};
use flash_dma_tests::case::expected;
use flash_dma_tests::prelude::*;
use flash_dma_tests::tensors::{dtype, floats, grad, load, loss, outputs, rows, values};

fast_burn!(
    parts_under_masks,
    random_parts,
    a_prefix_and_causal_keys,
    rows_without_keys_leave_no_trace,
    one_part_is_itself,
    nothing_at_all,
    weights_have_the_rounding_of_the_lse,
    refusals,
);
on_burn_cpu!(two_parts);

/// The parts of the keys after each cut.
fn spans(cuts: &[usize], len: usize) -> Vec<(usize, usize)> {
    let starts = [0].into_iter().chain(cuts.iter().copied());
    let ends = cuts.iter().copied().chain([len]);
    starts
        .zip(ends)
        .map(|(start, end)| (start, end - start))
        .collect()
}

/// A mask in which some rows of some parts, or all of them, see nothing.
fn parts_under_masks<B: Backend>(burn: &Burn<B>) {
    let sizes = [2, 4, 2, 33, 130, 16];
    for (pattern, cuts) in [
        (Pattern::Random(0.4), &[64][..]),
        (Pattern::Tiles(16, 64), &[64, 128]),
        (Pattern::Window(20), &[1, 40, 90]),
        (Pattern::Nothing, &[70]),
    ] {
        for element in TYPES {
            let case = MaskedCase::new(sizes).mask([2, 1, 33, 130], pattern);
            check_masked(&case.element(element), cuts, burn);
        }
    }
}

/// Lengths, masks and cuts at random.
fn random_parts<B: Backend>(burn: &Burn<B>) {
    // A GPU compiles for each number and shape of parts.
    let problems = if B::SIZE == Size::Large { 6 } else { 24 };
    for seed in 0..problems {
        let mut rng = Rng::new(seed);
        let (kv_heads, group) = (1 + rng.below(2), 1 + rng.below(3));
        let lengths = [1 + rng.below(40), 2 + rng.below(150)];
        let dim = [8, 16, 40][rng.below(3)];
        let ([q_len, k_len], batch) = (lengths, 1 + rng.below(2));
        let sizes = [batch, kv_heads * group, kv_heads, q_len, k_len, dim];
        let pattern = Pattern::Random(rng.uniform());
        let mut case = MaskedCase::new(sizes).mask([1, 1, q_len, k_len], pattern);
        case = case.element(TYPES[rng.below(3)]);
        case.seed = seed;
        let cuts = (0..rng.below(4)).map(|_| 1 + rng.below(k_len - 1));
        let mut cuts: Vec<usize> = cuts.collect();
        cuts.sort_unstable();
        cuts.dedup();
        check_masked(&case, &cuts, burn);
    }
}

#[cfg(feature = "cpu")]
fn two_parts<B: Backend>(burn: &Burn<B>) {
    let case = MaskedCase::new([1, 2, 1, 5, 9, 8]);
    check_masked(&case.mask([1, 1, 5, 9], Pattern::Random(0.5)), &[4], burn);
}

fn check_masked<B: Backend>(case: &MaskedCase, cuts: &[usize], burn: &Burn<B>) {
    if burn.lacks(case.element) {
        return;
    }
    let device = burn.device().clone().autodiff();
    let (inputs, p) = (case.inputs(), case.problem());
    let grads = Grads::random(&p, case.seed);
    let leaves = rows(&p, [&inputs.q, &inputs.k, &inputs.v], &device);
    let [q, k, v] = leaves.map(Tensor::require_grad);
    let visible = inputs.visible.as_ref().expect("a case with a mask");
    let mask = TensorData::new(visible.values.clone(), visible.shape);
    let mask = Tensor::<4, Bool>::from_data(mask, &device);
    // Every other part by a plan of its mask.
    let parts = spans(cuts, p.k_len).into_iter().enumerate();
    let parts = parts.map(|(n, (start, len))| {
        let [k, v] = [&k, &v].map(|x| x.clone().narrow(2, start, len));
        let mask = AttentionMask::visible(mask.clone().narrow(3, start, len));
        let part = MaskedAttention::new(q.clone(), k, v);
        let part = match n % 2 {
            0 => part.mask(mask),
            _ => part.plan(&TilePlan::new(mask, [p.q_len, len], p.causal)),
        };
        part.options(case.options).forward_with_lse()
    });
    let merged = merge_attention(parts);
    assert_eq!(merged.0.dtype(), dtype(p.element));
    let actual = loss(&merged, &grads).backward();
    let [dq, dk, dv] = [q, k, v].map(|x| grad(&x, &actual));
    let outputs = outputs(merged);
    let expected = case.expected(&inputs, &grads);
    let others = || case.others(&inputs, true);
    expected.check(others, &outputs, &[&dq, &dk, &dv], format!("{case:?}"));
}

/// A prefix that several prompts share, and each prompt's own keys.
fn a_prefix_and_causal_keys<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    let case = Case::new(30, 100).plain().heads(4, 2);
    let (inputs, p) = (case.inputs(), case.problem());
    let grads = Grads::random(&p, case.seed);
    let leaves = rows(&p, [&inputs.q, &inputs.k, &inputs.v], &device);
    let [q, k, v] = leaves.map(Tensor::require_grad);
    let part = |start, len, causal| {
        let [k, v] = [&k, &v].map(|x| x.clone().narrow(2, start, len));
        let options = AttentionOptions::new().with_causal(causal);
        let part = Attention::new(q.clone(), k, v).options(options);
        part.forward_with_lse()
    };
    let merged = merge_attention([part(0, 70, false), part(70, 30, true)]);
    let actual = loss(&merged, &grads).backward();
    let [dq, dk, dv] = [q, k, v].map(|x| grad(&x, &actual));
    let outputs = outputs(merged);
    let expected = expected(&inputs, &grads);
    expected.check(Vec::new, &outputs, &[&dq, &dk, &dv], format!("{case:?}"));
}

/// Three rows: of the first part, of the second, and of neither; the content of rows without keys does not matter.
fn rows_without_keys_leave_no_trace<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    let (nan, none) = (f64::NAN, f64::NEG_INFINITY);
    let part = |out: [f64; 3], lse: [f64; 3]| {
        let out: Vec<f64> = out.into_iter().flat_map(|x| [x; 8]).collect();
        let out = floats::<4>(&out, [1, 1, 3, 8], &device).require_grad();
        let lse = floats::<3>(&lse, [1, 1, 3], &device).require_grad();
        (out, lse)
    };
    let a = part([2.0, nan, nan], [-300.0, none, none]);
    let b = part([nan, 3.0, nan], [none, 400.0, none]);
    let merged = merge_attention([a.clone(), b.clone()]);
    let out = values(merged.0.clone());
    assert_eq!([out[0], out[8], out[16]], [2.0, 3.0, 0.0]);
    assert_eq!(values(merged.1.clone()), [-300.0, 400.0, none]);
    let grads = Grads {
        out: vec![1.0; 24],
        lse: Some(vec![5.0; 3]),
    };
    let grads = loss(&merged, &grads).backward();
    for ((out, lse), of_out, of_lse) in [
        (a, [1.0, 0.0, 0.0], [5.0, 0.0, 0.0]),
        (b, [0.0, 1.0, 0.0], [0.0, 5.0, 0.0]),
    ] {
        let out = grad(&out, &grads);
        assert_eq!([out[0], out[8], out[16]], of_out);
        assert_eq!(grad(&lse, &grads), of_lse);
    }
}

/// Bit by bit, and with the gradients that it is given.
fn one_part_is_itself<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    let case = Case::new(20, 20).plain().element(Bf16);
    if burn.lacks(case.element) {
        return;
    }
    let p = case.problem();
    let q = load::<4>(&case.inputs().q, p.q_shape(), p.element, &device);
    let k = load::<4>(&case.inputs().k, p.kv_shape(), p.element, &device);
    let (out, lse) = Attention::new(q, k.clone(), k).forward_with_lse();
    let (out, lse) = (out.detach().require_grad(), lse.detach().require_grad());
    let merged = merge_attention([(out.clone(), lse.clone())]);
    assert_eq!(values(merged.0.clone()), values(out.clone()));
    assert_eq!(values(merged.1.clone()), values(lse.clone()));
    let given = Grads {
        out: vec![1.0; out.shape().num_elements()],
        lse: Some(vec![2.0; lse.shape().num_elements()]),
    };
    let grads = loss(&merged, &given).backward();
    assert_eq!(grad(&out, &grads), given.out);
    let of_lse = grad(&lse, &grads);
    assert!(of_lse.iter().all(|x| (x - 2.0).abs() < 1e-5), "{of_lse:?}");
}

fn nothing_at_all<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let part = |len| {
        let out = Tensor::<4>::zeros([2, 2, len, 8], device);
        (out, Tensor::<3>::zeros([2, 2, len], device))
    };
    let (out, lse) = merge_attention([part(0), part(0)]);
    assert_eq!((out.dims(), lse.dims()), ([2, 2, 0, 8], [2, 2, 0]));
}

/// The documentation states these errors.
fn weights_have_the_rounding_of_the_lse<B: Backend>(burn: &Burn<B>) {
    for (size, documented) in [(1e3, 6.2e-5), (1e6, 6.5e-2)] {
        let device = burn.device();
        let parts: Vec<[f64; 2]> = (0..64u32)
            .map(|n| f64::from(n) * 0.0137)
            .map(|x| [size + x, size + 0.3 - x])
            .collect();
        let lse = |part: usize| {
            let values: Vec<f64> = parts.iter().map(|lse| lse[part]).collect();
            floats::<3>(&values, [1, 1, 64], device)
        };
        let ones = Tensor::<4>::ones([1, 1, 64, 8], device);
        let nothing = ones.zeros_like();
        let (out, _) = merge_attention([(ones, lse(0)), (nothing, lse(1))]);
        let weights: Vec<f64> = out.into_data_as::<f32>().iter::<f64>().step_by(8).collect();
        let errors = (weights.iter().zip(&parts)).map(|(weight, [first, second])| {
            let exact = 1.0 / (1.0 + (second - first).exp());
            (weight / exact - 1.0).abs()
        });
        let worst = errors.fold(0.0, f64::max);
        assert!(
            worst < documented && worst > documented / 20.0,
            "{worst:e} at {size:e}"
        );
    }
}

fn refusals<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let part = |heads| {
        let out = Tensor::<4>::zeros([2, heads, 3, 8], device);
        (out, Tensor::<3>::zeros([2, heads, 3], device))
    };
    let refused = try_merge_attention([]);
    assert_eq!(refused.unwrap_err(), AttentionError::NoParts);
    let shape = |tensor| AttentionError::Shape {
        tensor,
        axis: 1,
        expected: 2,
        actual: 4,
    };
    let refused = try_merge_attention([part(2), part(4)]);
    assert_eq!(refused.unwrap_err(), shape(TensorName::Out));
    let refused = try_merge_attention([(part(2).0, part(4).1)]);
    assert_eq!(refused.unwrap_err(), shape(TensorName::Lse));
    let (out, lse) = part(2);
    let refused = try_merge_attention([part(2), (out.clone().cast(DType::BF16), lse.clone())]);
    let element = |tensor| AttentionError::element_type(tensor, F32, Bf16);
    assert_eq!(refused.unwrap_err(), element(TensorName::Out));
    let refused = try_merge_attention([(out, lse.cast(DType::BF16))]);
    assert_eq!(refused.unwrap_err(), element(TensorName::Lse));
}
