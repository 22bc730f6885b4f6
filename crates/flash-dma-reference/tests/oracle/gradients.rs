//! Every gradient against central differences, in f64.

use crate::{bits, masked, problem};
use flash_dma_problem::{
    AlibiSlopes, AttentionOptions, Dropout, ElementType, NormProblem, OWN_OUTPUT_WEIGHT, Problem,
    Rotary,
};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::masked::{Broadcast, MaskedInputs};
use flash_dma_reference::norm::Norm;
use flash_dma_reference::zoh::Zoh;
use flash_dma_reference::{Exact, Forward, Inputs, Rng, select};

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

/// The loss with these gradients; without the gradient of the LSE it depends on the output alone.
fn loss(forward: &Forward, grad_out: &[f64], grad_lse: Option<&[f64]>) -> f64 {
    let of_lse = grad_lse.map_or(0.0, |grads| weigh(&forward.lse.values, grads));
    weigh(&forward.out.values, grad_out) + of_lse
}

fn check_attention(problem: Problem, kind: Scores) {
    let inputs = generate::inputs(problem, kind, 1.0, 7);
    let (grad_out, grad_lse) = generate::gradients(&problem, 7);
    let loss = |x: &Inputs| loss(&x.forward(), &grad_out, Some(&grad_lse));
    let grads = inputs.backward(&grad_out, Some(&grad_lse));
    check("q", &inputs, |x| &mut x.q, &grads.q.values, loss);
    check("k", &inputs, |x| &mut x.k, &grads.k.values, loss);
    check("v", &inputs, |x| &mut x.v, &grads.v.values, loss);
    if let Some(scores) = grads.scores {
        fn of(x: &mut Inputs) -> &mut Vec<f64> {
            x.scores.as_mut().unwrap()
        }
        check("scores", &inputs, of, &scores.values, loss);
    }
}

#[test]
fn attention_gradients_equal_central_differences() {
    for causal in [true, false] {
        let base = AttentionOptions::new().with_causal(causal);
        let capped = base.with_keep_window(4).with_softcap(1.5).with_scale(0.6);
        let dropped = |rate| capped.with_dropout(Dropout::new(rate, 3).unwrap());
        let alibi = capped.with_alibi(AlibiSlopes::standard(4));
        for (q, k, options, kind) in [
            ([4, 7, 8], [2, 9], base.with_keep_window(3), Scores::Normal),
            ([3, 9, 8], [1, 6], base.with_keep_window(2), Scores::Recency),
            ([2, 8, 16], [2, 8], capped, Scores::Padded),
            ([2, 5, 8], [1, 6], base, Scores::AllPadded),
            ([4, 7, 8], [2, 9], dropped(0.2), Scores::Normal),
            ([4, 7, 8], [2, 9], dropped(0.9), Scores::Normal),
            ([4, 7, 8], [2, 9], alibi, Scores::Normal),
            ([4, 9, 8], [2, 7], alibi, Scores::Normal),
        ] {
            check_attention(problem(q, k, true, options), kind);
        }
        let plain = problem([2, 5, 8], [1, 11], false, base.with_softcap(2.0));
        check_attention(plain, Scores::Normal);
    }
}

fn draw<T>(shape: [usize; 4], mut value: impl FnMut() -> T) -> Option<Broadcast<T>> {
    let values = (0..shape.iter().product()).map(|_| value()).collect();
    Some(Broadcast { shape, values })
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
                if bits % 3 == 0 {
                    options.dropout = Some(Dropout::new(0.3, bits as u64).unwrap());
                }
                if bits % 4 == 1 {
                    options.alibi = Some(AlibiSlopes::standard(heads));
                }
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
                let inner = generate::inputs(problem, Scores::Normal, 1.0, bits as u64);
                let mask = draw(mask, || rng.below(3) > 0);
                let inputs = masked(&inner, mask, draw(bias, || rng.normal()));
                let (grad_out, grad_lse) = generate::gradients(&problem, 3);
                let loss = |x: &MaskedInputs| loss(&x.forward(), &grad_out, Some(&grad_lse));
                let grads = inputs.backward(&grad_out, Some(&grad_lse));
                let bias = grads.bias.expect("there is a bias");
                fn of(x: &mut MaskedInputs) -> &mut Vec<f64> {
                    &mut x.bias.as_mut().unwrap().values
                }
                check("bias", &inputs, of, &bias.values, loss);
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
        dt_proj: (normal(heads * heads * head_dim).iter())
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
    let squared = |x| one_plus(x).powi(2);
    let expected = [one_plus(1.0), one_plus(2.0), squared(3.0), squared(5.0)];
    for (z, expected) in zoh.scores().iter().zip(expected) {
        assert!((z / expected - 1.0).abs() < 1e-14, "{z} {expected}");
    }
}

/// The results of a problem whose query heads attend to the pairs of `visible`, `[batch, heads, q_len, k_len]`, with
/// the scores as a bias per key: dense attention under a mask, independent of selections.
fn masked_forward(inputs: &Inputs, visible: &[bool]) -> Forward {
    let p = &inputs.problem;
    let visible = Broadcast {
        shape: [p.batch, p.q_heads, p.q_len, p.k_len],
        values: visible.to_vec(),
    };
    masked(inputs, Some(visible), Some(key_bias(inputs))).forward()
}

fn key_bias(inputs: &Inputs) -> Broadcast<f64> {
    let [batch, kv_heads, k_len] = inputs.problem.scores_shape();
    Broadcast {
        shape: [batch, kv_heads, 1, k_len],
        values: inputs.scores.clone().unwrap(),
    }
}

/// For each query row its pairs with the keys that a window keeps: a pair's index in `[batch, heads, q_len, k_len]`,
/// and its key's in the scores.
fn kept_pairs(inputs: &Inputs, window: usize) -> Vec<Vec<(usize, usize)>> {
    let p = &inputs.problem;
    let scores = inputs.scores.as_ref().unwrap();
    let of_row = |row: usize| {
        let first = row / p.q_len / p.group() * p.k_len;
        let scores = &scores[first..][..p.k_len];
        let kept = select::selected(scores, window, p.position(row % p.q_len));
        let pair = |j| (row * p.k_len + j, first + j);
        kept.into_iter().map(pair).collect()
    };
    (0..p.batch * p.q_heads * p.q_len).map(of_row).collect()
}

/// The mask that shows these pairs.
fn visible(p: &Problem, pairs: &[Vec<(usize, usize)>]) -> Vec<bool> {
    let mut visible = vec![false; p.batch * p.q_heads * p.q_len * p.k_len];
    for &(pair, _) in pairs.iter().flatten() {
        visible[pair] = true;
    }
    visible
}

/// Compares the gradient of each key with the change of the loss, pair by pair; a key without a pair has none.
fn check_changes(gradient: &Exact, changes: &[(usize, f64)], tolerance: f64) {
    let mut expected = vec![None; gradient.values.len()];
    for &(key, change) in changes {
        *expected[key].get_or_insert(0.0) += change;
    }
    for (at, (&got, change)) in gradient.values.iter().zip(expected).enumerate() {
        let expected = change.unwrap_or(0.0);
        assert!(
            (got - expected).abs() < tolerance * (1.0 + expected.abs()),
            "key {at}: {got}, but the loss changes by {expected}"
        );
        assert_eq!(gradient.magnitude[at] > 0.0, change.is_some(), "key {at}");
    }
}

/// `out` and the LSE change by exactly `p (v - out)` and `softplus` when a key is added, so that the change of a
/// linear loss is the gradient itself.
fn check_runners_up(p: Problem, kind: Scores, runners_up: usize, with_lse: bool) {
    let inputs = generate::inputs(p, kind, 1.0, 11);
    let (grad_out, grad_lse) = generate::gradients(&p, 11);
    let grad_lse = with_lse.then_some(&grad_lse[..]);
    let gradient = inputs.rank_gradient(runners_up, &grad_out, grad_lse);
    let kept = kept_pairs(&inputs, p.window);
    let mut visible = visible(&p, &kept);
    let loss = |visible: &[bool]| loss(&masked_forward(&inputs, visible), &grad_out, grad_lse);
    let without = loss(&visible);
    let mut changes = Vec::new();
    for (kept, wider) in kept.iter().zip(kept_pairs(&inputs, p.window + runners_up)) {
        let outside = wider.into_iter().filter(|pair| !kept.contains(pair));
        // A row that attends to nothing gives none.
        for (pair, key) in outside.filter(|_| !kept.is_empty()) {
            visible[pair] = true;
            changes.push((key, loss(&visible) - without));
            visible[pair] = false;
        }
    }
    check_changes(&gradient, &changes, 1e-11);
}

/// A window of 3 keys with the cap and the scale, without causal masking, and where the first queries see nothing, so
/// that all keys that they might add count for nothing.
fn windows() -> [Problem; 3] {
    let options = AttentionOptions::new().with_keep_window(3);
    let capped = options.with_softcap(1.5).with_scale(0.6);
    [
        problem([4, 5, 8], [1, 9], true, capped),
        problem([2, 4, 8], [2, 9], true, options.with_causal(false)),
        problem([2, 9, 8], [1, 6], true, options),
    ]
}

#[test]
fn the_gradient_of_a_runner_up_is_the_change_of_the_loss_if_it_is_attended() {
    let options = AttentionOptions::new().with_keep_window(3);
    for with_lse in [false, true] {
        use Scores::{Increasing, Normal, Padded, Ties};
        for kind in [Normal, Ties, Padded, Increasing] {
            for runners_up in [0, 1, 2, 20] {
                let p = problem([4, 9, 8], [2, 9], true, options);
                check_runners_up(p, kind, runners_up, with_lse);
            }
        }
        for p in windows() {
            check_runners_up(p, Normal, 2, with_lse);
        }
    }
}

/// Checks the definition: the output and the LSE of a query without the key, with the output itself in its place by its
/// own weight.
fn check_kept(p: Problem, kind: Scores, with_lse: bool) {
    let inputs = generate::inputs(p, kind, 1.0, 12);
    let (grad_out, grad_lse) = generate::gradients(&p, 12);
    let grad_lse = with_lse.then_some(&grad_lse[..]);
    // Some from their own position on, some later, some never.
    let mut rng = Rng::new(7);
    let from: Vec<u32> = (0..p.batch * p.kv_heads * p.k_len)
        .map(|key| ((key % p.k_len) + [0, 0, 1, 3, p.k_len][rng.below(5)]) as u32)
        .collect();
    let gradient = inputs.left_out_gradient(&from, &grad_out, grad_lse);
    let naive = inputs.naive_left_out_gradient(&from, &grad_out, grad_lse);
    let own = f64::from(OWN_OUTPUT_WEIGHT);

    let kept = kept_pairs(&inputs, p.window);
    let mut visible = visible(&p, &kept);
    let with = masked_forward(&inputs, &visible);
    let mut changes = Vec::new();
    for (pair, key) in kept.into_iter().flatten() {
        let row = pair / p.k_len;
        if i64::from(from[key]) > p.position(row % p.q_len) {
            continue;
        }
        visible[pair] = false;
        let without = masked_forward(&inputs, &visible);
        visible[pair] = true;
        let rest = (without.lse.values[row] - with.lse.values[row]).exp();
        let of_lse = (1.0 + own).ln() - (rest + own).ln();
        let mut change = grad_lse.map_or(0.0, |grads| grads[row] * of_lse);
        let of_row = |values: &[f64]| values[row * p.head_dim..(row + 1) * p.head_dim].to_vec();
        let outs = [&with.out.values, &without.out.values].map(|out| of_row(out));
        for ((grad, out), other) in of_row(&grad_out).iter().zip(&outs[0]).zip(&outs[1]) {
            let left = (rest * other + own * out) / (rest + own);
            change += grad * (out - left);
        }
        changes.push((key, change));
    }
    assert!(changes.len() > 4, "{}", changes.len());
    check_changes(&gradient, &changes, 1e-9);
    for (at, (got, size)) in gradient.values.iter().zip(&gradient.magnitude).enumerate() {
        let bound = 2e-6 * (1.0 + 1.0 / own) * size;
        assert!((naive[at] - got).abs() <= bound, "key {at}: {}", naive[at]);
    }
}

#[test]
fn the_gradient_of_a_kept_key_is_the_change_of_the_loss_if_it_is_left_out() {
    let options = AttentionOptions::new().with_keep_window(3);
    for with_lse in [false, true] {
        for kind in [Scores::Normal, Scores::Ties, Scores::Padded] {
            let p = problem([4, 9, 8], [2, 9], true, options);
            check_kept(p, kind, with_lse);
        }
        for p in windows() {
            check_kept(p, Scores::Normal, with_lse);
        }
    }
}

#[test]
fn runners_up_of_a_mask_are_those_of_the_selection_that_it_shows() {
    let options = AttentionOptions::new().with_keep_window(3);
    for kind in [Scores::Normal, Scores::Nan] {
        let p = problem([4, 6, 8], [2, 9], true, options);
        let inputs = generate::inputs(p, kind, 1.0, 13);
        let (grad_out, grad_lse) = generate::gradients(&p, 13);
        let scores = inputs.scores.as_ref().unwrap();
        let shape = [p.batch, p.kv_heads, p.q_len, p.k_len];
        let pairs = |window: usize| -> Vec<bool> {
            let heads = scores.chunks(p.k_len);
            let rows = heads.flat_map(|head| (0..p.q_len).map(move |i| (head, p.position(i))));
            rows.flat_map(|(head, position)| {
                let kept = select::selected(head, window, position);
                (0..p.k_len).map(move |j| kept.contains(&j))
            })
            .collect()
        };
        let (attended, wider) = (pairs(3), pairs(5));
        let outside = (wider.iter().zip(&attended)).map(|(&wider, &kept)| wider && !kept);
        let broadcast = |values| Broadcast { shape, values };
        let runners_up = broadcast(outside.collect());
        let attended = Some(broadcast(attended));
        let masked = masked(&inputs, attended, Some(key_bias(&inputs)));
        let grad_lse = Some(&grad_lse[..]);
        let of_mask = masked.rank_gradient(&runners_up, &grad_out, grad_lse);
        let of_scores = inputs.rank_gradient(2, &grad_out, grad_lse);
        assert_eq!(bits(&of_mask.values), bits(&of_scores.values));
        assert_eq!(bits(&of_mask.magnitude), bits(&of_scores.magnitude));
        let of_mask = masked.naive_rank_gradient(&runners_up, &grad_out, grad_lse);
        let of_scores = inputs.naive_rank_gradient(2, &grad_out, grad_lse);
        assert_eq!(bits(&of_mask), bits(&of_scores));
    }
}

#[test]
fn the_gradient_of_a_runner_up_is_stable_far_from_the_lse() {
    let options = AttentionOptions::new().with_keep_window(1).with_scale(1.0);
    for (logit, weight, softplus) in [(1e4, 1.0, 1e4), (-1e4, 0.0, 0.0), (0.0, 0.5, 2f64.ln())] {
        let (q, k, f32) = ([1, 1, 1, 8], [1, 1, 2, 8], ElementType::F32);
        let p = Problem::new(&q, &k, &k, Some(&k[..3]), f32, &options);
        let inputs = Inputs {
            problem: p.unwrap(),
            q: vec![1.0; 8],
            // The selected key's logit is 0, with its score.
            k: [vec![-0.125; 8], vec![logit / 8.0; 8]].concat(),
            v: [vec![2.0; 8], vec![3.0; 8]].concat(),
            scores: Some(vec![1.0, 0.0]),
        };
        let gradient = inputs.rank_gradient(1, &[1.0; 8], Some(&[0.25]));
        assert_eq!(gradient.values, [0.0, 8.0 * weight + 0.25 * softplus]);
    }
}

#[test]
fn a_runner_up_that_is_not_a_number_reaches_its_own_gradient_only() {
    let options = AttentionOptions::new().with_keep_window(1);
    let p = problem([2, 6, 8], [1, 6], true, options);
    let mut inputs = generate::inputs(p, Scores::Decreasing, 1.0, 4);
    let (grad_out, grad_lse) = generate::gradients(&p, 4);
    // Key 2 of the first head is a runner-up of the queries from its own on.
    inputs.k[2 * 8] = f64::NAN;
    let gradient = inputs.rank_gradient(2, &grad_out, Some(&grad_lse));
    for (at, x) in gradient.values.iter().enumerate() {
        assert_eq!(x.is_nan(), at == 2, "key {at}: {x}");
    }
}

#[test]
fn norm_gradients_equal_central_differences() {
    let element = ElementType::F32;
    let rotary = Rotary {
        positions: 9,
        start: 3,
    };
    let (shape, gamma) = ([2, 5, 3, 8], [8]);
    let heads = |norm, rotary| NormProblem::heads(&shape, norm, rotary, element).unwrap();
    for problem in [
        NormProblem::rows(&[2, 3, 7], &[7], element, 1e-2).unwrap(),
        heads(Some((&gamma[..], 1e-5)), Some(rotary)),
        heads(Some((&gamma[..], 1e-5)), None),
        heads(None, Some(rotary)),
    ] {
        let inputs = Norm::random(problem, 4);
        let mut rng = Rng::new(9);
        let grad_out: Vec<f64> = inputs.x.iter().map(|_| rng.normal()).collect();
        let loss = |inputs: &Norm| weigh(&inputs.forward().values, &grad_out);
        let grads = inputs.backward(&grad_out);
        check("x", &inputs, |n| &mut n.x, &grads.x.values, loss);
        if let Some(gamma) = grads.gamma {
            fn of(norm: &mut Norm) -> &mut Vec<f64> {
                norm.gamma.as_mut().unwrap()
            }
            check("gamma", &inputs, of, &gamma.values, loss);
        }
    }
}

/// Neighbouring features are rotated, by the position alone: products depend on distances.
#[test]
fn rotated_products_depend_on_the_distance_alone() {
    let product = |q: usize, k: usize| {
        let row = |start, seed| {
            let rotary = Some(Rotary {
                positions: 64,
                start,
            });
            let problem = NormProblem::heads(&[1, 1, 1, 16], None, rotary, ElementType::F32);
            Norm::random(problem.unwrap(), seed).forward().values
        };
        let (q, k) = (row(q, 1), row(k, 2));
        q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()
    };
    // The table is f32.
    assert!((product(7, 3) - product(60, 56)).abs() < 1e-5);
    assert!((product(7, 3) - product(7, 4)).abs() > 1e-3);
}
