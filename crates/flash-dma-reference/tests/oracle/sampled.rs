//! The sampled oracle against the whole one, on problems small enough for both.

use flash_dma_problem::{AlibiSlopes, AttentionOptions, Dropout, ElementType, Problem};
use flash_dma_reference::compare::{GRADIENT, OUTPUT, naive_error};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::sampled::{Sampled, Source, attended_keys, first_nonzero, reader, spread};
use flash_dma_reference::{Backward, Exact, Inputs, Rng};

struct Case {
    inputs: Inputs,
    scores: Option<Vec<f32>>,
    grad_out: Vec<f64>,
    grad_lse: Vec<f32>,
}

fn case(
    [batch, q_heads, kv_heads, q_len, k_len]: [usize; 5],
    scores: Option<Scores>,
    options: AttentionOptions,
    element: ElementType,
) -> Case {
    let (q, k) = ([batch, q_heads, q_len, 16], [batch, kv_heads, k_len, 16]);
    let problem = Problem::new(&q, &k, &k, scores.map(|_| &k[..3]), element, &options).unwrap();
    let inputs = generate::inputs(problem, scores.unwrap_or(Scores::Normal), 1.0, 11);
    let (grad_out, grad_lse) = generate::gradients(&problem, 11);
    Case {
        scores: (inputs.scores.as_ref()).map(|z| z.iter().map(|&z| z as f32).collect()),
        inputs,
        grad_out,
        grad_lse: grad_lse.iter().map(|&g| g as f32).collect(),
    }
}

/// All kinds of problems: causal or not, more queries than keys and fewer, groups, ties, NaN and −∞.
fn cases() -> Vec<Case> {
    use ElementType::{Bf16, F16, F32};
    let window = |w| AttentionOptions::new().with_keep_window(w);
    let (dropout, alibi) = (Dropout::new(0.4, 1).unwrap(), AlibiSlopes::standard(4));
    let full = window(6).with_causal(false);
    let capped = AttentionOptions::new().with_softcap(1.5);
    let normal = Some(Scores::Normal);
    vec![
        case([1, 2, 1, 40, 40], normal, window(7), F32),
        case([2, 6, 2, 5, 90], Some(Scores::Ties), window(20), Bf16),
        case([1, 3, 3, 50, 30], Some(Scores::Padded), window(4), F16),
        case([1, 4, 2, 33, 33], Some(Scores::Nan), window(9), F32),
        case(
            [2, 4, 2, 21, 40],
            normal,
            window(9).with_dropout(dropout),
            F32,
        ),
        case([2, 4, 2, 21, 40], normal, window(9).with_alibi(alibi), F32),
        case([2, 2, 1, 17, 29], None, capped, F32),
        case(
            [1, 2, 2, 21, 48],
            Some(Scores::Increasing),
            full.with_softcap(0.7).with_scale(0.8),
            F32,
        ),
        case([1, 1, 1, 12, 12], Some(Scores::AllPadded), window(3), F32),
    ]
}

impl Case {
    fn grad_lse(&self) -> Vec<f64> {
        self.grad_lse.iter().copied().map(f64::from).collect()
    }

    fn has_nan(&self) -> bool {
        self.scores.iter().flatten().any(|z| z.is_nan())
    }

    /// Calls `test` with a source of these inputs.
    fn with_source<R>(&self, test: impl FnOnce(&Source) -> R) -> R {
        let [q, k, v] = [&self.inputs.q, &self.inputs.k, &self.inputs.v].map(|x| reader(x));
        test(&Source {
            problem: self.inputs.problem,
            q: &q,
            k: &k,
            v: &v,
            scores: self.scores.as_deref(),
            grad_out: &reader(&self.grad_out),
            grad_lse: Some(&self.grad_lse),
        })
    }

    /// The gradients of the whole oracle if those of `out` and `lse` are zero outside `rows`.
    fn backward_of(&self, rows: &[usize]) -> Backward {
        let (mut grad_out, mut grad_lse) = (self.grad_out.clone(), self.grad_lse());
        for (row, grads) in grad_out.chunks_exact_mut(16).enumerate() {
            if !rows.contains(&row) {
                grads.fill(0.0);
                grad_lse[row] = 0.0;
            }
        }
        self.inputs.backward(&grad_out, Some(&grad_lse))
    }
}

/// `dk`, `dv`, and `dscores` if there are any.
fn assert_keys(k: &Sampled, v: &Sampled, scores: Option<&Sampled>, whole: &Backward) {
    assert_rows("dk", k, &whole.k);
    assert_rows("dv", v, &whole.v);
    assert_eq!(scores.is_some(), whole.scores.is_some());
    if let (Some(scores), Some(whole)) = (scores, &whole.scores) {
        assert_rows("dscores", scores, whole);
    }
}

fn assert_rows(name: &str, sampled: &Sampled, whole: &Exact) {
    for (n, &row) in sampled.rows.iter().enumerate() {
        for d in 0..sampled.width {
            let (at, of) = (n * sampled.width + d, row * sampled.width + d);
            let (actual, expected) = (sampled.exact.values[at], whole.values[of]);
            let equal = actual == expected
                || (actual.is_nan() && expected.is_nan())
                || (actual - expected).abs() <= 1e-13 * whole.magnitude[of];
            let what = format!("{name} row {row}, {d}");
            assert!(equal, "{what}: {actual} instead of {expected}");
        }
    }
}

#[test]
fn sampled_rows_and_the_keys_they_touch_are_those_of_the_whole_oracle() {
    for (n, case) in cases().iter().enumerate() {
        let whole = case.inputs.forward();
        case.with_source(|source| {
            let rows = source.choose_rows(3, 5, &mut Rng::new(n as u64));
            let grads = case.backward_of(&rows);
            let sampled = source.rows(&rows);
            assert_eq!(sampled.out.rows, rows, "case {n}");
            assert_rows("out", &sampled.out, &whole.out);
            assert_rows("lse", &sampled.lse, &whole.lse);
            assert_rows("dq", &sampled.q, &grads.q);
            if case.has_nan() {
                // A row without a gradient of its own still spreads NaN.
                return;
            }
            assert_keys(&sampled.k, &sampled.v, sampled.scores.as_ref(), &grads);
            let keys = &sampled.k.rows;
            let elsewhere = |values: &[f64], rows: &[usize], width| {
                first_nonzero(&reader(values), values.len() / width, width, rows)
            };
            assert_eq!(elsewhere(&grads.q.values, &rows, 16), None, "case {n}");
            assert_eq!(elsewhere(&grads.k.values, keys, 16), None, "case {n}");
            assert_eq!(elsewhere(&grads.v.values, keys, 16), None, "case {n}");
            if let Some(scores) = &grads.scores {
                assert_eq!(elsewhere(&scores.values, keys, 1), None, "case {n}");
            }
        });
    }
}

#[test]
fn sampled_keys_are_those_of_the_whole_oracle_if_out_and_lse_are() {
    for (n, case) in cases().iter().enumerate() {
        let p = case.inputs.problem;
        let forward = case.inputs.forward();
        let grads = case.inputs.backward(&case.grad_out, Some(&case.grad_lse()));
        case.with_source(|source| {
            for head in 0..p.batch * p.kv_heads {
                let mut rng = Rng::new(n as u64);
                let keys = attended_keys(&source.intervals(head), 12, &mut rng);
                assert_eq!(keys.len(), 12.min(p.k_len));
                let (out, lse) = (reader(&forward.out.values), reader(&forward.lse.values));
                let sampled = source.keys(head, &keys, &out, &lse);
                assert_keys(&sampled.k, &sampled.v, sampled.scores.as_ref(), &grads);
            }
        });
    }
}

#[test]
fn the_naive_error_of_a_sample_is_of_the_size_of_the_whole_one() {
    for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
        let options = AttentionOptions::new().with_keep_window(32);
        let case = case([1, 2, 1, 300, 300], Some(Scores::Normal), options, element);
        let (whole, naive) = (case.inputs.forward(), case.inputs.naive_forward());
        let grad_lse = case.grad_lse();
        let grads = case.inputs.backward(&case.grad_out, Some(&grad_lse));
        let naive_grads = case.inputs.naive_backward(&case.grad_out, Some(&grad_lse));
        case.with_source(|source| {
            let rows = spread(600, 60, &mut Rng::new(1));
            let sampled = source.rows(&rows);
            let (out, lse) = (reader(&naive.out), reader(&naive.lse));
            let keys = attended_keys(&source.intervals(0), 40, &mut Rng::new(1));
            let keys = source.keys(0, &keys, &out, &lse);
            for (name, sampled, error) in [
                ("out", &sampled.out, naive_error(&whole.out, &naive.out)),
                ("dq", &sampled.q, naive_error(&grads.q, &naive_grads.q)),
                ("dk", &keys.k, naive_error(&grads.k, &naive_grads.k)),
                ("dv", &keys.v, naive_error(&grads.v, &naive_grads.v)),
            ] {
                let ratio = naive_error(&sampled.exact, &sampled.naive) / error;
                assert!((0.2..=1.5).contains(&ratio), "{element} {name}: {ratio}");
            }
            // Compares the naive implementation's whole passes with its sample.
            let shape = case.inputs.problem.kv_shape();
            let dk = reader(&naive_grads.k);
            let k = keys.k.compare("dk", &shape, &dk, element, GRADIENT);
            assert!(k.is_ok(), "{}", k.unwrap_err());
        });
    }
}

#[test]
fn a_spoiled_element_is_named_by_its_index_in_the_whole_tensor() {
    let options = AttentionOptions::new().with_keep_window(8);
    let (normal, f32) = (Some(Scores::Normal), ElementType::F32);
    let case = case([2, 4, 2, 30, 30], normal, options, f32);
    let mut out = case.inputs.forward().out.values;
    let rows = [3, 125, 239];
    // Row 125 is query 5 of head 0 of sequence 1.
    out[125 * 16 + 9] += 0.01;
    let shape = case.inputs.problem.q_shape();
    case.with_source(|source| {
        let sampled = source.rows(&rows).out;
        let result = sampled.compare("out", &shape, &reader(&out), f32, OUTPUT);
        let failure = result.unwrap_err();
        assert_eq!(failure.index, [1, 0, 5, 9]);
        assert_eq!(failure.shape, shape);
        assert!((failure.actual - failure.exact - 0.01).abs() < 1e-9);
    });
    let found = first_nonzero(&reader(&[0.0, -0.0, 0.0, f64::NAN, 1.0, 0.0]), 3, 2, &[2]);
    assert_eq!(found.map(|(row, _)| row), Some(1));
}

#[test]
fn half_precision_buffers_are_read_as_they_are() {
    let values = [0, 1, 2, 3, 4, 5, 6, 7].map(|n| half::bf16::from_f32(n as f32 / 4.0));
    let mut row = [0.0; 4];
    reader(&values)(1, &mut row);
    assert_eq!(row, [1.0, 1.25, 1.5, 1.75]);
}

/// Only the scores are allocated in the size of the problem, so 2³² elements at half a million tokens take a moment.
/// With q = 0 a row is the mean of its values under the softmax of its scores.
#[test]
fn a_problem_past_2_to_the_31_elements_is_sampled_in_a_moment() {
    const LEN: usize = 1 << 19;
    // Four query heads read each of 16 kv heads.
    let (q, k) = ([2, 64, LEN, 64], [2, 16, LEN, 64]);
    let options = AttentionOptions::new().with_keep_window(64);
    let problem = Problem::new(&q, &k, &k, Some(&k[..3]), ElementType::Bf16, &options).unwrap();
    let mut rng = Rng::new(5);
    let scores: Vec<f32> = (0..32 * LEN).map(|_| rng.normal() as f32).collect();
    let zero = |_: usize, into: &mut [f64]| into.fill(0.0);
    let one = |_: usize, into: &mut [f64]| into.fill(1.0);
    let index = |row: usize, into: &mut [f64]| into.fill((row % LEN) as f64 / LEN as f64);
    let source = Source {
        problem,
        q: &zero,
        k: &one,
        v: &index,
        scores: Some(&scores),
        grad_out: &one,
        grad_lse: None,
    };
    let rows = source.choose_rows(2, 3, &mut rng);
    assert!(rows.iter().any(|&row| row * 64 > 1 << 31), "{rows:?}");
    let sampled = source.rows(&rows);
    let head = |row: usize| &scores[row / LEN / 4 * LEN..][..LEN];
    let softmax = |row: usize| -> Vec<(usize, f64)> {
        let z: Vec<f64> = head(row).iter().copied().map(f64::from).collect();
        let keys = flash_dma_reference::select::selected(&z, 64, (row % LEN) as i64);
        let sum: f64 = keys.iter().map(|&j| z[j].exp()).sum();
        keys.into_iter().map(|j| (j, z[j].exp() / sum)).collect()
    };
    for (n, &row) in rows.iter().enumerate() {
        let terms = softmax(row).into_iter();
        let mean: f64 = terms.map(|(j, p)| p * j as f64 / LEN as f64).sum();
        let error = (sampled.out.exact.values[n * 64] - mean).abs();
        assert!(error < 1e-12, "row {row}");
    }
    // dv of a key is the sum of its probabilities. The best key of the last sequence stays once it is there.
    let last = head(2 * 64 * LEN - 1);
    let best = (0..LEN).max_by(|&a, &b| last[a].total_cmp(&last[b]));
    let best = best.unwrap();
    let lse = |row: usize, into: &mut [f64]| into[0] = if row < 124 * LEN { 0.0 } else { 40.0 };
    let dv = source.keys(31, &[best], &zero, &lse).v;
    let expected = (4 * (LEN - best)) as f64 * (f64::from(last[best]) - 40.0).exp();
    assert_eq!(dv.rows, [31 * LEN + best]);
    let sum = dv.exact.values[63];
    assert!((sum / expected - 1.0).abs() < 1e-9, "{sum}");
}
