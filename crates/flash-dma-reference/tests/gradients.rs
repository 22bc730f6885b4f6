//! Every gradient against central differences, in f64.

use flash_dma_problem::{AttentionOptions, ElementType, Problem};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::masked::{Broadcast, MaskedInputs};
use flash_dma_reference::zoh::Zoh;
use flash_dma_reference::{Inputs, Rng};

/// Compares `gradient` of the tensor that `get` names with central differences of `loss`.
fn check<T: Clone>(
    name: &str,
    inputs: &T,
    get: impl Fn(&mut T) -> &mut Vec<f64>,
    gradient: &[f64],
    loss: impl Fn(&T) -> f64,
) {
    let step = 1e-5;
    let mut moved = inputs.clone();
    assert_eq!(gradient.len(), get(&mut moved).len(), "{name}");
    for (at, &analytic) in gradient.iter().enumerate() {
        let x = get(&mut moved)[at];
        let mut at_offset = |offset: f64| {
            get(&mut moved)[at] = x + offset;
            loss(&moved)
        };
        let numeric = (at_offset(step) - at_offset(-step)) / (2.0 * step);
        get(&mut moved)[at] = x;
        assert!(
            (numeric - analytic).abs() <= 1e-8 * (1.0 + numeric.abs()),
            "{name}[{at}]: {analytic} analytic, {numeric} numeric"
        );
    }
}

fn weigh(out: &[f64], weights: &[f64]) -> f64 {
    // An LSE of −∞ has no gradient: its weight does not count.
    let terms = out.iter().zip(weights).filter(|(x, _)| x.is_finite());
    terms.map(|(x, w)| x * w).sum()
}

fn problem(q: [usize; 3], k: [usize; 2], scores: bool, options: AttentionOptions) -> Problem {
    let (q, k) = ([2, q[0], q[1], q[2]], [2, k[0], k[1], q[2]]);
    Problem::new(
        &q,
        &k,
        &k,
        scores.then_some(&k[..3]),
        ElementType::F32,
        &options,
    )
    .unwrap()
}

fn check_attention(problem: Problem, kind: Scores) {
    let inputs = generate::inputs(problem, kind, 1.0, 7);
    let (grad_out, grad_lse) = generate::gradients(&problem, 7);
    let loss = |x: &Inputs| {
        let forward = x.forward();
        weigh(&forward.out.values, &grad_out) + weigh(&forward.lse.values, &grad_lse)
    };
    let grads = inputs.backward(&grad_out, Some(&grad_lse));
    check("q", &inputs, |x| &mut x.q, &grads.q.values, loss);
    check("k", &inputs, |x| &mut x.k, &grads.k.values, loss);
    check("v", &inputs, |x| &mut x.v, &grads.v.values, loss);
    if let Some(scores) = grads.scores {
        check(
            "scores",
            &inputs,
            |x| x.scores.as_mut().unwrap(),
            &scores.values,
            loss,
        );
    }
}

#[test]
fn attention_gradients_equal_central_differences() {
    let options = AttentionOptions::new;
    for causal in [true, false] {
        let base = options().with_causal(causal);
        check_attention(
            problem([4, 7, 8], [2, 9], true, base.with_keep_window(3)),
            Scores::Normal,
        );
        check_attention(
            problem([3, 9, 8], [1, 6], true, base.with_keep_window(2)),
            Scores::Recency,
        );
        let capped = base.with_keep_window(4).with_softcap(1.5).with_scale(0.6);
        check_attention(problem([2, 8, 16], [2, 8], true, capped), Scores::Padded);
        check_attention(
            problem([2, 5, 8], [1, 11], false, base.with_softcap(2.0)),
            Scores::Normal,
        );
        check_attention(problem([2, 5, 8], [1, 6], true, base), Scores::AllPadded);
    }
}

#[test]
fn masked_gradients_equal_central_differences() {
    let mut rng = Rng::new(5);
    let (heads, kv_heads, q_len, k_len) = (4, 2, 5, 7);
    for causal in [true, false] {
        for softcap in [None, Some(1.5)] {
            for bits in 0..24usize {
                let mut options = AttentionOptions::new().with_causal(causal);
                options.softcap = softcap;
                let problem = problem([heads, q_len, 8], [kv_heads, k_len], false, options);
                // Every broadcast of the bias; the mask uses a different one.
                let shape_of = |bits: usize| {
                    [
                        [1, 2][bits & 1],
                        [1, kv_heads, heads][(bits >> 3) % 3],
                        [1, q_len][(bits >> 1) & 1],
                        [1, k_len][(bits >> 2) & 1],
                    ]
                };
                let (mask, bias) = (shape_of((bits + 9) % 24), shape_of(bits));
                let mut inner = generate::inputs(problem, Scores::Normal, 1.0, bits as u64);
                let inputs = MaskedInputs {
                    problem,
                    q: std::mem::take(&mut inner.q),
                    k: std::mem::take(&mut inner.k),
                    v: std::mem::take(&mut inner.v),
                    visible: Some(Broadcast {
                        shape: mask,
                        values: (0..mask.iter().product())
                            .map(|_| rng.below(3) > 0)
                            .collect(),
                    }),
                    bias: Some(Broadcast {
                        shape: bias,
                        values: (0..bias.iter().product()).map(|_| rng.normal()).collect(),
                    }),
                };
                let (grad_out, grad_lse) = generate::gradients(&problem, 3);
                let loss = |x: &MaskedInputs| {
                    let forward = x.forward();
                    weigh(&forward.out.values, &grad_out) + weigh(&forward.lse.values, &grad_lse)
                };
                let grads = inputs.backward(&grad_out, Some(&grad_lse));
                let bias = grads.bias.expect("there is a bias");
                check(
                    "bias",
                    &inputs,
                    |x| &mut x.bias.as_mut().unwrap().values,
                    &bias.values,
                    loss,
                );
                if bits == 23 {
                    check("q", &inputs, |x| &mut x.q, &grads.q.values, loss);
                    check("k", &inputs, |x| &mut x.k, &grads.k.values, loss);
                    check("v", &inputs, |x| &mut x.v, &grads.v.values, loss);
                }
            }
        }
    }
}

#[test]
fn zoh_gradients_equal_central_differences() {
    let mut rng = Rng::new(6);
    let mut normal = |len: usize| (0..len).map(|_| rng.normal()).collect::<Vec<f64>>();
    let (batch, heads, len, head_dim) = (2, 3, 5, 4);
    let inputs = Zoh {
        batch,
        heads,
        len,
        head_dim,
        v: normal(batch * heads * len * head_dim),
        dt_proj: normal(heads * heads * head_dim)
            .iter()
            .map(|w| 0.3 * w)
            .collect(),
        a: normal(heads).iter().map(|a| 0.5 * a).collect(),
    };
    let weights = normal(batch * heads * len);
    let loss = |x: &Zoh| weigh(&x.scores(), &weights);
    let grads = inputs.backward(&weights);
    check("v", &inputs, |x| &mut x.v, &grads.v, loss);
    check("dt_proj", &inputs, |x| &mut x.dt_proj, &grads.dt_proj, loss);
    check("a", &inputs, |x| &mut x.a, &grads.a, loss);
}

#[test]
fn zoh_scores_read_every_head_of_their_own_token() {
    let zoh = Zoh {
        batch: 1,
        heads: 2,
        len: 2,
        head_dim: 1,
        // Token 0 is (1, 3), token 1 is (2, 5).
        v: vec![1.0, 2.0, 3.0, 5.0],
        dt_proj: vec![1.0, 0.0, 0.0, 1.0],
        a: vec![1.0, 2.0],
    };
    // exp(softplus(x)) = 1 + exp(x), and its square with a = 2.
    let one_plus = |x: f64| 1.0 + x.exp();
    let expected = [
        one_plus(1.0),
        one_plus(2.0),
        one_plus(3.0).powi(2),
        one_plus(5.0).powi(2),
    ];
    for (z, expected) in zoh.scores().iter().zip(expected) {
        assert!((z / expected - 1.0).abs() < 1e-14, "{z} {expected}");
    }
}
