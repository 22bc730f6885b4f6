//! Probabilities of chosen queries against the oracle: of dense calls, selections, masks and documents.

use burn::tensor::{Bool, DType, Device, Tensor, TensorData};
use burn_flash_dma::{
    Attention, AttentionMask, Documents, MaskedAttention, PackedAttention, Selector, TilePlan,
    select,
};
use flash_dma_reference::compare::compare_probabilities;
use flash_dma_reference::{Exact, compose};
use flash_dma_tests::prelude::*;
use flash_dma_tests::tensors::{self, floats, values};

fast_burn!(
    the_definition,
    random_problems,
    masks_biases_and_plans,
    a_rule_selects_the_keys,
    documents,
    nothing_to_compute,
    refusals,
);
on_burn_cpu!(a_few_rows);

/// A call of a case, tracked, if the device is one of autodiff, and its scores.
fn call(case: &Case, device: &Device) -> (Attention, Option<Tensor<3>>) {
    let (inputs, p) = (case.inputs(), case.problem());
    let tracked = device.is_autodiff();
    let rows = tensors::rows(&p, [&inputs.q, &inputs.k, &inputs.v], device);
    let [q, k, v] = rows.map(|x| x.set_require_grad(tracked));
    let scores = inputs.scores.as_ref();
    let scores = scores.map(|z| floats(z, p.scores_shape(), device).set_require_grad(tracked));
    (Attention::new(q, k, v).options(case.options), scores)
}

/// Compares with the oracle, and the sum of each row with 1, or with 0 where nothing is attended to.
fn check(p: Tensor<4>, exact: &Exact, what: &str) {
    let shape = p.dims();
    let values = values(p);
    compare_probabilities(&shape, &values, exact).unwrap_or_else(|error| panic!("{what}: {error}"));
    let rows = values
        .chunks(shape[3])
        .zip(exact.magnitude.chunks(shape[3]));
    for (row, magnitude) in rows {
        let (sum, size): (f64, f64) = (row.iter().sum(), magnitude.iter().sum());
        let whole = f64::from(size > 0.0);
        let bound = 4.0 * f64::from(f32::EPSILON) * (1.0 + size);
        assert!(
            sum.is_nan() || (sum - whole).abs() <= bound,
            "{what}: {sum}"
        );
    }
}

fn check_case<B: Backend>(case: &Case, rows: &[usize], burn: &Burn<B>) {
    if burn.lacks(case.element) {
        return;
    }
    let device = burn.device().clone().autodiff();
    let exact = case.inputs().probabilities(rows);
    let what = format!("{} at {case:?}", Burn::<B>::NAME);
    let (attention, scores) = call(case, &device);
    let p = match scores {
        None => attention.probabilities(rows),
        Some(scores) => {
            let attention = attention.scores(scores.clone());
            let intervals = select(scores, case.problem().window);
            let given = attention.clone().intervals(&intervals);
            let given = given.probabilities(rows);
            let p = attention.probabilities(rows);
            let same = given.not_equal(p.clone()).any().into_scalar::<bool>();
            assert!(!same || case.scores == Some(Scores::Nan), "{what}");
            p
        }
    };
    assert_eq!(p.dtype(), DType::F32, "{what}");
    assert!(!p.is_tracked(), "{what}");
    check(p, &exact, &what);
}

fn the_definition<B: Backend>(burn: &Burn<B>) {
    let last = [0, 3, 16, 3];
    for case in [
        Case::new(17, 17).plain(),
        Case::new(17, 40).plain().full().heads(4, 2),
        Case::new(40, 17)
            .plain()
            .options(|o| o.with_softcap(2.0).with_scale(0.7)),
        Case::new(17, 70).heads(8, 2).window(9),
        Case::new(33, 33).scores(Scores::Padded),
        Case::new(20, 20).scores(Scores::AllPadded),
        Case::new(40, 40).scores(Scores::Ties).full(),
        Case::new(24, 24).scores(Scores::Nan),
        Case::new(17, 40)
            .heads(4, 2)
            .options(|o| o.with_alibi(AlibiSlopes::standard(4))),
        Case::new(40, 17)
            .plain()
            .full()
            .heads(3, 1)
            .options(|o| o.with_softcap(2.0).with_alibi(AlibiSlopes::standard(3))),
        Case::new(40, 40).deviation(30.0),
        Case::new(130, 130).dim(128).heads(2, 2),
    ] {
        for element in TYPES {
            check_case(&case.clone().element(element), &last, burn);
        }
    }
}

/// Lengths, heads, windows and rows at random.
fn random_problems<B: Backend>(burn: &Burn<B>) {
    // A GPU compiles for each number of rows.
    let problems = if B::SIZE == Size::Large { 12 } else { 60 };
    for seed in 0..problems {
        let mut rng = Rng::new(seed);
        let (q_len, k_len) = (1 + rng.below(90), 1 + rng.below(90));
        let (kv_heads, group) = (1 + rng.below(3), 1 + rng.below(3));
        let mut case = Case::new(q_len, k_len).heads(kv_heads * group, kv_heads);
        case = case.dim([8, 16, 40][rng.below(3)]);
        case = case.element(TYPES[rng.below(3)]);
        case = match rng.below(3) {
            0 => case.plain(),
            _ => case.window(1 + rng.below(k_len)),
        };
        case.options.causal = rng.below(4) > 0;
        (case.batch, case.seed) = (1 + rng.below(2), seed);
        let rows: Vec<usize> = (0..1 + rng.below(5)).map(|_| rng.below(q_len)).collect();
        check_case(&case, &rows, burn);
    }
}

#[cfg(feature = "cpu")]
fn a_few_rows<B: Backend>(burn: &Burn<B>) {
    check_case(&Case::new(9, 17).window(5), &[8, 0], burn);
}

fn masks_biases_and_plans<B: Backend>(burn: &Burn<B>) {
    let sizes = [2, 4, 2, 21, 75, 16];
    let rows = [20, 0, 7];
    let case = |causal| MaskedCase::new(sizes).causal(causal);
    let (some, half) = (Pattern::Random(0.3), Pattern::Random(0.5));
    let tiles = case(true).mask([1, 2, 21, 75], Pattern::Tiles(16, 64));
    for case in [
        case(false).mask([2, 4, 21, 75], some).bias([2, 4, 21, 75]),
        tiles.bias([1, 2, 1, 75]),
        case(true).mask([2, 1, 1, 75], half),
        case(false).mask([1, 1, 21, 1], half).bias([1, 1, 21, 1]),
        case(true).bias([1, 4, 21, 75]),
        case(false).mask([1, 1, 21, 75], Pattern::Nothing),
    ] {
        for hidden in [false, true] {
            let case = MaskedCase {
                hidden,
                ..case.clone()
            };
            let (inputs, p) = (case.inputs(), case.problem());
            let device = burn.device();
            let [q, k, v] = tensors::rows(&p, [&inputs.q, &inputs.k, &inputs.v], device);
            let bias = inputs.bias.as_ref();
            let bias = bias.map(|x| floats::<4>(&x.values, x.shape, device));
            let attention = MaskedAttention::new(q, k, v)
                .bias(bias)
                .options(case.options);
            let mask = inputs.visible.as_ref().map(|mask| {
                let values: Vec<bool> = mask.values.iter().map(|&shown| shown != hidden).collect();
                let data = TensorData::new(values, mask.shape);
                let tensor = Tensor::<4, Bool>::from_data(data, device);
                match hidden {
                    false => AttentionMask::visible(tensor),
                    true => AttentionMask::hidden(tensor),
                }
            });
            let exact = inputs.probabilities(&rows);
            let masked = attention.clone().mask(mask.clone());
            let what = format!("{} at {case:?}", Burn::<B>::NAME);
            check(masked.probabilities(&rows), &exact, &what);
            if let Some(mask) = mask {
                let plan = TilePlan::new(mask, [p.q_len, p.k_len], p.causal);
                let planned = attention.plan(&plan).probabilities(&rows);
                check(planned, &exact, &format!("a plan, {what}"));
            }
        }
    }
}

/// Recent keys and sinks: exactly the keys of the rule have a probability.
fn a_rule_selects_the_keys<B: Backend>(burn: &Burn<B>) {
    let case = Case::new(60, 60).heads(2, 1).window(12);
    let (attention, scores) = call(&case, burn.device());
    let scores = scores.expect("a case with scores");
    let rule = SelectionRule {
        window: 12,
        recent: 4,
        sinks: 2,
    };
    let intervals = Selector::top(12).recent(4).sinks(2).select(scores.clone());
    let attention = attention.scores(scores).intervals(&intervals);
    let rows = [59, 30, 5];
    let p = attention.probabilities(&rows).into_data_as::<f32>();
    let p: Vec<f32> = p.iter().collect();
    let all = case.inputs().scores.expect("a case with scores");
    for (at, row) in p.chunks(60).enumerate() {
        let (batch, query) = (at / 6, rows[at % 3]);
        let scores = &all[batch * 60..(batch + 1) * 60];
        let kept = compose::attended(scores, &rule, query);
        let found: Vec<usize> = (0..60).filter(|&key| row[key] > 0.0).collect();
        assert_eq!(found, kept, "batch {batch}, query {query}");
    }
}

/// Probabilities within each document alone, with any engine.
fn documents<B: Backend>(burn: &Burn<B>) {
    let documents = Documents::try_from_cu_seqlens(&[0, 30, 30, 55]).expect("rising");
    let rows = [29, 30, 54];
    let case = Case::new(55, 55).heads(4, 2);
    let (inputs, device) = (case.inputs(), burn.device());
    let flat = |x: &[f64], heads: usize| {
        let x = floats::<4>(x, [2, heads, 55, 16], device);
        x.narrow(0, 0, 1).squeeze_dim::<3>(0).swap_dims(0, 1)
    };
    let [q, k, v] = [(&inputs.q, 4), (&inputs.k, 2), (&inputs.v, 2)].map(|(x, n)| flat(x, n));
    let scores = inputs.scores.as_ref().expect("a case with scores");
    let scores = floats::<3>(scores, [2, 2, 55], device);
    let scores = scores.narrow(0, 0, 1).squeeze_dim::<2>(0).swap_dims(0, 1);
    let call = PackedAttention::new(q.clone(), k.clone(), v.clone(), &documents);
    let alone = |at: usize, options: AttentionOptions, scored: bool| {
        let (start, len) = if at < 30 { (0, 30) } else { (30, 25) };
        let part = |x: &Tensor<3>| {
            let x = x.clone().narrow(0, start, len);
            x.swap_dims(0, 1).unsqueeze_dim::<4>(0)
        };
        let attention = Attention::new(part(&q), part(&k), part(&v)).options(options);
        let z = scores.clone().narrow(0, start, len).swap_dims(0, 1);
        let p = match scored {
            true => (attention.scores(z.unsqueeze_dim(0))).probabilities(&[at - start]),
            false => attention.probabilities(&[at - start]),
        };
        let p: Vec<f32> = p.into_data_as::<f32>().iter().collect();
        (start, len, p)
    };
    let check = |p: Tensor<3>, options: AttentionOptions, scored: bool| {
        assert_eq!(p.dims(), [4, 3, 55]);
        let p: Vec<f32> = p.into_data_as::<f32>().iter().collect();
        for (n, &at) in rows.iter().enumerate() {
            let (start, len, own) = alone(at, options, scored);
            for head in 0..4 {
                let row = &p[(head * 3 + n) * 55..][..55];
                let outside = (0..55).filter(|key| !(start..start + len).contains(key));
                assert!(outside.into_iter().all(|key| row[key] == 0.0));
                for (a, b) in row[start..start + len].iter().zip(&own[head * len..]) {
                    assert!((a - b).abs() < 1e-5, "{a}, alone {b}");
                }
            }
        }
    };
    let causal = AttentionOptions::new();
    check(call.clone().probabilities(&rows), causal, false);
    let window = causal.with_keep_window(7);
    let scored = call.clone().scores(scores.clone()).options(window);
    check(scored.probabilities(&rows), window, true);
    let full = causal.with_causal(false);
    let both_ways = call.options(full);
    check(both_ways.probabilities(&rows), full, false);
}

fn nothing_to_compute<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let zeros = |len| Tensor::<4>::zeros([2, 2, len, 8], device);
    let call = Attention::new(zeros(5), zeros(0), zeros(0));
    assert_eq!(call.probabilities(&[1, 4]).dims(), [2, 2, 2, 0]);
    let call = Attention::new(zeros(5), zeros(6), zeros(6));
    assert_eq!(call.probabilities(&[]).dims(), [2, 2, 0, 6]);
}

fn refusals<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let zeros = |len| Tensor::<4>::zeros([2, 2, len, 8], device);
    let call = Attention::new(zeros(5), zeros(6), zeros(6));
    let masked = MaskedAttention::new(zeros(5), zeros(6), zeros(6));
    let past = AttentionError::TooLarge {
        what: "the index of a query",
        size: 5,
        limit: 4,
    };
    let refused = call.try_probabilities(&[0, 5]);
    assert_eq!(refused.unwrap_err(), past);
    assert_eq!(masked.try_probabilities(&[5]).unwrap_err(), past);
}
