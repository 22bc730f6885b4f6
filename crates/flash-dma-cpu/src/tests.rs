//! The engine against the oracle: every gradient, on the cases that tiling gets wrong.

use crate::*;
use flash_dma_reference::compare::{GRADIENT, OUTPUT, compare, compare_lse};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::{Rng, generate::gradients};
use half::{bf16, f16};

/// What the engine gives for one problem, in f64.
#[derive(Clone, Debug)]
struct Results {
    out: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    dz: Vec<f64>,
}

/// Narrows exactly representable values.
fn narrow<E: Element + From32>(x: &[f64]) -> Vec<E> {
    x.iter().map(|&x| E::from32(x as f32)).collect()
}

trait From32: Element {
    fn from32(x: f32) -> Self;
    fn to64(self) -> f64;
}

impl From32 for f32 {
    fn from32(x: f32) -> Self {
        x
    }
    fn to64(self) -> f64 {
        self.into()
    }
}

impl From32 for f16 {
    fn from32(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn to64(self) -> f64 {
        self.into()
    }
}

impl From32 for bf16 {
    fn from32(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn to64(self) -> f64 {
        self.into()
    }
}

fn wide<E: From32>(x: &[E]) -> Vec<f64> {
    x.iter().map(|x| x.to64()).collect()
}

/// A `[b, h, n, d]` tensor stored as `[b, n, h, d]` with gaps after every row, and its strides.
fn interleave<E: From32>(x: &[E], [b, h, n, d]: [usize; 4]) -> (Vec<E>, [usize; 4]) {
    let row = d + 3;
    let strides = [h * n * row, row, h * row, 1];
    let mut data = vec![E::from32(f32::NAN); b * h * n * row];
    for r in 0..b * h * n {
        let (b, h, n) = (r / n / h, r / n % h, r % n);
        let to = b * strides[0] + h * strides[1] + n * strides[2];
        data[to..to + d].copy_from_slice(&x[r * d..(r + 1) * d]);
    }
    (data, strides)
}

/// Selection, forward and backward. Outputs start as NaN: whatever is not written shows.
fn engine<E: From32>(
    case: &flash_dma_reference::Inputs,
    grad_out: &[f64],
    grad_lse: Option<&[f64]>,
    strided: bool,
) -> Results {
    let p = &case.problem;
    let tensor = |x: &[f64], shape: [usize; 4]| -> (Vec<E>, [usize; 4]) {
        let x = narrow::<E>(x);
        if strided {
            return interleave(&x, shape);
        }
        let strides = View::contiguous(&x, shape).strides;
        (x, strides)
    };
    fn view<E>((data, strides): &(Vec<E>, [usize; 4]), shape: [usize; 4]) -> View<'_, E, 4> {
        View {
            data,
            shape,
            strides: *strides,
        }
    }
    let q = tensor(&case.q, p.q_shape());
    let k = tensor(&case.k, p.kv_shape());
    let v = tensor(&case.v, p.kv_shape());
    let scores: Option<Vec<f32>> =
        (case.scores.as_ref()).map(|z| z.iter().map(|&z| z as f32).collect());
    let mut intervals = vec![Interval { first: 9, end: 9 }; scores.as_ref().map_or(0, Vec::len)];
    let selection = scores.as_ref().map(|scores| {
        let scores = View::contiguous(scores, p.scores_shape());
        select(scores, p.window, &mut intervals).unwrap();
        Selection {
            scores,
            intervals: &intervals,
        }
    });
    let inputs = Inputs {
        q: view(&q, p.q_shape()),
        k: view(&k, p.kv_shape()),
        v: view(&v, p.kv_shape()),
        selection,
    };
    let nan = E::from32(f32::NAN);
    let mut out = vec![nan; case.q.len()];
    let mut lse = vec![f32::NAN; case.q.len() / p.head_dim];
    forward(p, inputs, &mut out, &mut lse).unwrap();

    let grad_out = tensor(grad_out, p.q_shape());
    let grad_lse: Option<Vec<f32>> = grad_lse.map(|g| g.iter().map(|&g| g as f32).collect());
    let (mut dq, mut dk, mut dv) = (
        out.clone(),
        vec![nan; case.k.len()],
        vec![nan; case.v.len()],
    );
    dq.fill(nan);
    let mut dz = vec![f32::NAN; scores.as_ref().map_or(0, Vec::len)];
    let saved = Saved {
        out: View::contiguous(&out, p.q_shape()),
        lse: &lse,
        grad_out: view(&grad_out, p.q_shape()),
        grad_lse: grad_lse.as_deref(),
    };
    let grads = Gradients {
        q: &mut dq,
        k: &mut dk,
        v: &mut dv,
        scores: p.has_scores.then_some(&mut dz[..]),
    };
    backward(p, inputs, saved, grads).unwrap();
    Results {
        out: wide(&out),
        lse: wide(&lse),
        dq: wide(&dq),
        dk: wide(&dk),
        dv: wide(&dv),
        dz: wide(&dz),
    }
}

fn run_engine(
    case: &flash_dma_reference::Inputs,
    grad_out: &[f64],
    grad_lse: Option<&[f64]>,
    strided: bool,
) -> Results {
    let run = match case.problem.element {
        ElementType::F32 => engine::<f32>,
        ElementType::F16 => engine::<f16>,
        ElementType::Bf16 => engine::<bf16>,
    };
    run(case, grad_out, grad_lse, strided)
}

/// Compares every output with the oracle's, naming the case in a failure.
fn check(
    case: &flash_dma_reference::Inputs,
    grad_out: &[f64],
    grad_lse: Option<&[f64]>,
    strided: bool,
) {
    let p = &case.problem;
    let got = run_engine(case, grad_out, grad_lse, strided);
    let (exact, naive) = (case.forward(), case.naive_forward());
    let (exact_grad, naive_grad) = (
        case.backward(grad_out, grad_lse),
        case.naive_backward(grad_out, grad_lse),
    );
    let (q, kv) = (p.q_shape(), p.kv_shape());
    let mut failures = Vec::new();
    let mut note = |result: Result<_, flash_dma_reference::Failure>| {
        if let Err(failure) = result {
            failures.push(failure.to_string());
        }
    };
    let e = p.element;
    note(compare(
        "out", &q, &got.out, &exact.out, &naive.out, e, OUTPUT,
    ));
    note(compare_lse(&p.lse_shape(), &got.lse, &exact.lse));
    note(compare(
        "dq",
        &q,
        &got.dq,
        &exact_grad.q,
        &naive_grad.q,
        e,
        GRADIENT,
    ));
    note(compare(
        "dk",
        &kv,
        &got.dk,
        &exact_grad.k,
        &naive_grad.k,
        e,
        GRADIENT,
    ));
    note(compare(
        "dv",
        &kv,
        &got.dv,
        &exact_grad.v,
        &naive_grad.v,
        e,
        GRADIENT,
    ));
    if let (Some(exact), Some(naive)) = (&exact_grad.scores, &naive_grad.scores) {
        let f32 = ElementType::F32;
        note(compare(
            "dz",
            &p.scores_shape(),
            &got.dz,
            exact,
            naive,
            f32,
            GRADIENT,
        ));
    }
    assert!(failures.is_empty(), "{p:?}\n{}", failures.join("\n"));
}

fn problem(
    [b, hq, hkv, nq, nk, d]: [usize; 6],
    scores: bool,
    element: ElementType,
    options: AttentionOptions,
) -> Problem {
    let kv = [b, hkv, nk, d];
    let scores = scores.then_some(&kv[..3]);
    Problem::new(&[b, hq, nq, d], &kv, &kv, scores, element, &options).unwrap()
}

const TYPES: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];

#[test]
fn random_problems_match_the_oracle() {
    let mut rng = Rng::new(7);
    let lengths = [1, 2, 15, 16, 17, 33, 64, 65, 113, 200, 257];
    for seed in 0..120 {
        let mut pick = |from: &[usize]| from[rng.below(from.len())];
        let (hkv, group) = (pick(&[1, 2, 3]), pick(&[1, 2, 4, 8]));
        let element = TYPES[pick(&[0, 1, 2])];
        // The yardstick is the naive implementation's worst error. In 16 bits that is the rounding
        // of a few outputs when few pairs exist: right by luck, so those sizes are left to f32.
        let (nq, nk) = match element {
            ElementType::F32 => (pick(&lengths), pick(&lengths)),
            _ => (pick(&lengths[6..]), 257),
        };
        let shape = [
            pick(&[1, 2]),
            hkv * group,
            hkv,
            nq,
            nk,
            pick(&[8, 16, 40, 64]),
        ];
        let has_scores = pick(&[0, 1, 1, 1]) == 1;
        let mut options = AttentionOptions::new().with_causal(pick(&[0, 1, 1]) == 1);
        if has_scores {
            options = options.with_keep_window(pick(&[1, 2, 7, 16, 40, 300]));
        }
        if pick(&[0, 0, 1]) == 1 {
            options = options.with_softcap(5.0);
        }
        let kind = Scores::ALL[pick(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9])];
        let strided = pick(&[0, 1]) == 1;
        let with_lse = pick(&[0, 1]) == 1;
        let p = problem(shape, has_scores, element, options);
        let case = generate::inputs(p, kind, 1.0, seed);
        let (grad_out, grad_lse) = gradients(&p, seed);
        check(&case, &grad_out, with_lse.then_some(&grad_lse), strided);
    }
}

#[test]
fn several_key_blocks_chunks_and_a_wide_head_match_the_oracle() {
    for (shape, window, kind) in [
        ([1, 2, 1, 700, 700, 64], Some(150), Scores::Normal),
        ([1, 1, 1, 600, 600, 256], Some(300), Scores::Recency),
        ([1, 4, 2, 400, 1100, 128], None, Scores::Normal),
        ([1, 1, 1, 1500, 1500, 16], Some(64), Scores::Increasing),
        ([1, 1, 1, 5, 3000, 32], Some(900), Scores::Normal),
        ([1, 1, 1, 3000, 5, 32], Some(3), Scores::Normal),
    ] {
        let mut options = AttentionOptions::new();
        options.keep_window = window;
        let p = problem(shape, true, ElementType::F32, options);
        let case = generate::inputs(p, kind, 1.0, 3);
        let (grad_out, grad_lse) = gradients(&p, 3);
        check(&case, &grad_out, Some(&grad_lse), false);
    }
}

#[test]
fn logits_thirty_times_larger_do_not_overflow() {
    for element in TYPES {
        for window in [20, 1000] {
            let options = AttentionOptions::new().with_keep_window(window);
            let p = problem([1, 4, 2, 130, 130, 64], true, element, options);
            let case = generate::inputs(p, Scores::Normal, 30.0, 11);
            let (grad_out, _) = gradients(&p, 11);
            check(&case, &grad_out, None, false);
        }
    }
}

#[test]
fn nan_and_infinity_reach_the_pairs_they_are_in_and_no_others() {
    let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let options = AttentionOptions::new()
            .with_keep_window([3, 10, 60][seed as usize % 3])
            .with_causal(seed % 4 != 3);
        let p = problem([1, 4, 2, 100, 100, 16], true, ElementType::F32, options);
        let mut case = generate::inputs(p, Scores::Normal, 1.0, seed);
        let (mut grad_out, _) = gradients(&p, seed);
        for _ in 0..2 {
            // Whole runs of rows: some are selected by a few queries, some by none.
            let value = bad[rng.below(3)];
            let target = match seed % 4 {
                0 => &mut case.k,
                1 => &mut case.v,
                2 => &mut case.q,
                _ => &mut grad_out,
            };
            let start = rng.below(target.len());
            let end = (start + rng.below(200)).min(target.len());
            target[start..end].fill(value);
        }
        check_places(&case, &grad_out);
    }
}

/// Non-finite values where the oracle has them; the others close (their own bound is not defined
/// beside infinite terms).
fn check_places(case: &flash_dma_reference::Inputs, grad_out: &[f64]) {
    let got = run_engine(case, grad_out, None, false);
    let (exact, grad) = (case.forward(), case.backward(grad_out, None));
    for (name, got, exact) in [
        ("out", &got.out, &exact.out),
        ("lse", &got.lse, &exact.lse),
        ("dq", &got.dq, &grad.q),
        ("dk", &got.dk, &grad.k),
        ("dv", &got.dv, &grad.v),
        ("dz", &got.dz, grad.scores.as_ref().unwrap()),
    ] {
        for (at, (&x, &y)) in got.iter().zip(&exact.values).enumerate() {
            let same =
                x == y || (x.is_nan() && y.is_nan()) || (x - y).abs() < 1e-4 * (1.0 + y.abs());
            assert!(same, "{name}[{at}] is {x:e} instead of {y:e}");
        }
    }
}

#[test]
fn infinite_scores_give_nan_rows_and_nothing_else() {
    let options = AttentionOptions::new().with_keep_window(8);
    let p = problem([1, 2, 1, 80, 80, 16], true, ElementType::F32, options);
    let mut case = generate::inputs(p, Scores::Normal, 1.0, 5);
    case.scores.as_mut().unwrap()[60] = f64::INFINITY;
    let (grad_out, _) = gradients(&p, 5);
    check(&case, &grad_out, None, false);
}

#[test]
fn empty_lengths_have_defined_results() {
    for (nq, nk) in [(0, 5), (5, 0), (0, 0)] {
        for scores in [false, true] {
            let shape = [2, 2, 1, nq, nk, 8];
            let p = problem(shape, scores, ElementType::F32, AttentionOptions::new());
            let case = generate::inputs(p, Scores::Normal, 1.0, 1);
            let (grad_out, grad_lse) = gradients(&p, 1);
            let got = run_engine(&case, &grad_out, Some(&grad_lse), false);
            assert_eq!(got.out.len(), 4 * nq * 8);
            assert!(got.out.iter().chain(&got.dq).all(|&x| x == 0.0));
            assert!(got.lse.iter().all(|&x| x == f64::NEG_INFINITY));
            let keys = got.dk.iter().chain(&got.dv).chain(&got.dz);
            assert!(keys.clone().all(|&x| x == 0.0));
            assert_eq!(keys.count(), 2 * nk * (8 + 8 + usize::from(scores)));
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let options = AttentionOptions::new().with_keep_window(100);
    let p = problem([1, 4, 1, 900, 900, 32], true, ElementType::F32, options);
    let case = generate::inputs(p, Scores::Normal, 1.0, 2);
    let (grad_out, _) = gradients(&p, 2);
    let results: Vec<String> = [1, 2, 5]
        .map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            format!(
                "{:?}",
                pool.install(|| run_engine(&case, &grad_out, None, false))
            )
        })
        .into();
    assert!(results[0] == results[1] && results[1] == results[2]);
}

#[test]
fn a_bad_argument_is_refused_and_nothing_is_written() {
    let p = problem(
        [1, 2, 1, 4, 4, 8],
        true,
        ElementType::F32,
        AttentionOptions::new(),
    );
    let (q, kv, z) = (vec![1.0f32; 64], vec![1.0f32; 32], [0.5f32; 4]);
    let intervals = [Interval { first: 0, end: 0 }; 4];
    let good = Inputs {
        q: View::contiguous(&q, p.q_shape()),
        k: View::contiguous(&kv, p.kv_shape()),
        v: View::contiguous(&kv, p.kv_shape()),
        selection: Some(Selection {
            scores: View::contiguous(&z, p.scores_shape()),
            intervals: &intervals,
        }),
    };
    let forward_error = |inputs: Inputs<'_, f32>, out_len: usize, lse_len: usize| {
        let (mut out, mut lse) = (vec![7.0; out_len], vec![7.0; lse_len]);
        let error = forward(&p, inputs, &mut out, &mut lse).unwrap_err();
        assert!(out.iter().chain(&lse).all(|&x| x == 7.0), "{error}");
        error.to_string()
    };
    assert_eq!(
        forward_error(good, 63, 8),
        "out needs 64 elements, but its buffer has 63"
    );
    assert_eq!(
        forward_error(good, 64, 9),
        "lse needs 8 elements, but its buffer has 9"
    );
    let mut bad = good;
    bad.q.strides = [64, 32, 1, 4];
    assert!(forward_error(bad, 64, 8).contains("q must have a contiguous last axis"));
    let mut bad = good;
    bad.k.data = &kv[1..];
    assert!(forward_error(bad, 64, 8).contains("k needs 32 elements"));
    let mut bad = good;
    bad.v.shape[2] = 3;
    assert!(forward_error(bad, 64, 8).contains("v must have size 4 on axis 2"));
    let mut bad = good;
    bad.v.strides[2] = usize::MAX;
    assert!(forward_error(bad, 64, 8).contains("v needs"));
    let mut bad = good;
    bad.selection = None;
    assert!(forward_error(bad, 64, 8).contains("scores and intervals"));
    let mut bad = good;
    bad.selection.as_mut().unwrap().intervals = &intervals[..3];
    assert!(forward_error(bad, 64, 8).contains("intervals needs 4"));
    let halves = vec![f16::ONE; 64];
    let inputs = Inputs {
        q: View::contiguous(&halves, p.q_shape()),
        k: View::contiguous(&halves[..32], p.kv_shape()),
        v: View::contiguous(&halves[..32], p.kv_shape()),
        selection: good.selection,
    };
    let error = forward(&p, inputs, &mut halves.clone(), &mut [0.0; 8]).unwrap_err();
    assert_eq!(error.to_string(), "q must be f32, but is f16");

    let (lse, short) = ([0.0f32; 8], [0.0f32; 7]);
    for (saved_lse, grad_lse, dz_len, text) in [
        (&short[..], None, Some(4), "lse needs 8"),
        (
            &lse[..],
            Some(&short[..]),
            Some(4),
            "the gradient of lse needs 8",
        ),
        (&lse, None, Some(5), "the gradient of scores needs 4"),
        (&lse, None, None, "the gradient of scores needs 4"),
    ] {
        let (mut dq, mut dk, mut dv) = (vec![7.0; 64], vec![7.0; 32], vec![7.0; 32]);
        let mut dz = vec![7.0; dz_len.unwrap_or(0)];
        let saved = Saved {
            out: good.q,
            lse: saved_lse,
            grad_out: good.q,
            grad_lse,
        };
        let grads = Gradients {
            q: &mut dq,
            k: &mut dk,
            v: &mut dv,
            scores: dz_len.map(|_| &mut dz[..]),
        };
        let error = backward(&p, good, saved, grads).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert!(
            dq.iter()
                .chain(&dk)
                .chain(&dv)
                .chain(&dz)
                .all(|&x| x == 7.0)
        );
    }

    let mut untouched = intervals;
    let scores = View::contiguous(&z, [1, 1, 4]);
    assert_eq!(
        select(scores, 0, &mut untouched),
        Err(AttentionError::ZeroWindow)
    );
    assert!(select(scores, 1, &mut untouched[..3]).is_err());
    assert_eq!(untouched, intervals);
}
