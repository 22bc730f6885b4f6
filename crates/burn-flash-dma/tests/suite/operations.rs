//! The operations below the `Tensor` API, on Flex's engine: against the oracle.

use crate::case::{Case, Gradients, Tensors, data, ints, values};
use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_flash_dma::ops::{
    DynamicMaskOps, OptionalFloat, OptionalInt, RankLearning, Saved, Selection, Wanted,
};
use burn_flash_dma::{AttentionOptions, ElementType, SelectionRule};
use flash_dma_reference::compare::{Exact, GRADIENT, compare, sum};
use flash_dma_reference::{Rng, compose, generate::Scores};

/// An engine's results for a case.
struct Results {
    out: Tensor<4>,
    lse: Tensor<3>,
    grads: Gradients,
    rank: Option<Vec<f64>>,
}

pub fn primitive<const D: usize>(tensor: Tensor<D>) -> FloatTensor<Flex> {
    tensor.try_into_primitive::<Flex>().unwrap()
}

fn read<const D: usize>(tensor: FloatTensor<Flex>) -> Vec<f64> {
    values(Tensor::<D>::from_primitive::<Flex>(tensor))
}

/// Results and gradients of a case, with or without a gradient of the LSE.
fn run(case: &Case, with_lse: bool, runners_up: RankLearning<Flex>) -> Results {
    let device = Device::flex();
    let p = *case.problem();
    let Tensors { q, k, v, scores } = case.tensors(&device);
    let [q, k, v] = [q, k, v].map(primitive);
    let scores = scores.map(primitive);
    let selection = |learning| match &scores {
        None => Selection::<Flex>::All,
        Some(scores) => Selection::Scored {
            scores: scores.clone(),
            intervals: Flex::dynamic_mask_select(scores.clone(), p.window.into()),
            learning,
        },
    };
    let [a, b, c] = [&q, &k, &v].map(Clone::clone);
    let unlearned = selection(RankLearning::None);
    let forwarded = Flex::dynamic_mask_forward(a, b, c, unlearned, p, Wanted::Saved);
    let saved = Saved {
        out: forwarded.out.clone(),
        residual: forwarded.residual,
        lse: forwarded.lse.clone(),
        lse_rest: forwarded.lse_rest,
        grad_out: primitive(case.grad_out(&device)),
        grad_lse: match with_lse {
            true => OptionalFloat::Some(primitive(case.grad_lse(&device))),
            false => OptionalFloat::None,
        },
    };
    let grads = Flex::dynamic_mask_backward(q, k, v, selection(runners_up), saved, p);
    let of_scores = |grad: OptionalFloat<Flex>| match grad {
        OptionalFloat::None => None,
        OptionalFloat::Some(grad) => Some(read::<3>(grad)),
    };
    let [q, k, v] = [grads.q, grads.k, grads.v].map(|grad| Some(read::<4>(grad)));
    let scores = of_scores(grads.scores);
    Results {
        out: Tensor::from_primitive::<Flex>(forwarded.out),
        lse: Tensor::from_primitive::<Flex>(forwarded.lse),
        grads: Gradients { q, k, v, scores },
        rank: of_scores(grads.rank),
    }
}

/// Together with all other gradients.
#[test]
fn the_gradient_of_runners_up_and_of_kept_keys_matches_the_oracle() {
    for (kind, element, more) in [
        (Scores::Normal, ElementType::F32, 3),
        (Scores::Padded, ElementType::Bf16, 100),
        (Scores::Nan, ElementType::F32, 2),
        (Scores::Ties, ElementType::F16, 0),
    ] {
        for (causal, softcap) in [(true, None), (true, Some(1.5)), (false, None)] {
            let mut options = AttentionOptions::new().with_keep_window(5);
            (options.causal, options.softcap) = (causal, softcap);
            let case = Case::new([2, 4, 2, 19, 24, 8], Some(kind), element, options, 3);
            for with_lse in [false, true] {
                let what = format!("{} with {more} runners-up, {with_lse}", case.name);
                let grad_lse = with_lse.then_some(&case.grad_lse[..]);
                let (inputs, grad_out) = (&case.inputs, &case.grad_out);
                let check = |left_out: Option<&[u32]>, (exact, naive): &(Exact, Vec<f64>)| {
                    let runners_up = runners_up(&case, more, left_out);
                    let rank = run(&case, with_lse, runners_up).rank;
                    let rank = rank.expect("there are runners-up");
                    let shape = case.problem().scores_shape();
                    let element = ElementType::F32;
                    compare(&what, &shape, &rank, exact, naive, element, GRADIENT).unwrap();
                };
                let of_next = (
                    inputs.rank_gradient(more, grad_out, grad_lse),
                    inputs.naive_rank_gradient(more, grad_out, grad_lse),
                );
                check(None, &of_next);
                // Some keys from their own position on, some later, some never.
                let keys = 0..of_next.1.len();
                let from = keys.map(|key| (key % 24 + [0, 0, 2, 24][key % 4]) as u32);
                let from: Vec<u32> = from.collect();
                let of_kept = (
                    inputs.left_out_gradient(&from, grad_out, grad_lse),
                    inputs.naive_left_out_gradient(&from, grad_out, grad_lse),
                );
                check(Some(&from), &sum(of_next, &of_kept));
            }
        }
    }
}

/// Learning of the rank: the next `more` keys, and kept keys that are left out.
fn runners_up(case: &Case, more: usize, left_out: Option<&[u32]>) -> RankLearning<Flex> {
    let device = Device::flex();
    let p = *case.problem();
    let scores = primitive(case.tensors(&device).scores.unwrap());
    let ends = Flex::dynamic_mask_select(scores.clone(), (p.window + more).into());
    let ends = Tensor::<4, Int>::from_primitive::<Flex>(ends);
    let ends = ends.narrow(3, 1, 1).squeeze_dim::<3>(3);
    RankLearning::Some {
        ends: ends.try_into_primitive::<Flex>().unwrap(),
        max_live: p.k_len,
        rank: scores,
        kept_from: match left_out {
            None => OptionalInt::None,
            Some(from) => {
                let from = data(from.iter().map(|&from| from as i32), p.scores_shape());
                let from = Tensor::<3, Int>::from_data(from, (&device, DType::I32));
                OptionalInt::Some(from.try_into_primitive::<Flex>().unwrap())
            }
        },
    }
}

#[test]
fn the_selection_is_exact() {
    let mut rng = Rng::new(4);
    for round in 0..200u64 {
        let kind = Scores::ALL[round as usize % Scores::ALL.len()];
        let len = 1 + rng.below(70);
        let window = 1 + rng.below(len + 3);
        let recent = [0, rng.below(window + 1)][round as usize / 2 % 2];
        let mut rule = SelectionRule::top(window);
        rule.recent = recent;
        let options = AttentionOptions::new().with_keep_window(window);
        let sizes = [1, 2, 2, len, len, 8];
        let case = Case::new(sizes, Some(kind), ElementType::F32, options, round);
        let scores = primitive(case.tensors(&Device::flex()).scores.unwrap());
        let intervals = Flex::dynamic_mask_select(scores, rule.kept());
        let intervals = Tensor::<4, Int>::from_primitive::<Flex>(intervals);
        assert_eq!(intervals.dims(), case.problem().intervals_shape());
        let heads = case.inputs.scores.as_ref().unwrap().chunks(len);
        let exact = heads.flat_map(|head| compose::intervals(head, &[len], &rule));
        let exact = exact.flat_map(|interval| [interval.first, interval.end].map(i64::from));
        let exact: Vec<i64> = exact.collect();
        assert_eq!(ints(intervals), exact, "{} {rule:?}", case.name);
    }
}

#[test]
fn non_finite_elements_reach_what_they_touch_and_no_more() {
    for window in [3, 100] {
        let options = AttentionOptions::new().with_keep_window(window);
        let sizes = [1, 4, 2, 24, 24, 8];
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for role in 0..4 {
                let scores = Some(Scores::Normal);
                let mut case = Case::new(sizes, scores, ElementType::F32, options, 9);
                let at = 2 * 8 * 5 + 3;
                match role {
                    0 => case.inputs.q[at] = value,
                    1 => case.inputs.k[at] = value,
                    2 => case.inputs.v[at] = value,
                    _ => case.grad_out[at] = value,
                }
                case.name = format!("{value} in tensor {role}, window {window}");
                check(&case, run(&case, false, RankLearning::None), role == 3);
            }
        }
    }
}

/// Checks every result by the oracle's rule. `delta` may be summed over the features or over the keys, which differ
/// in NaN and infinity where an incoming gradient is infinite: there (`any_kind`) a gradient only must not be finite.
fn check(case: &Case, results: Results, any_kind: bool) {
    case.check_forward(results.out, results.lse);
    let exact = case.inputs.backward(&case.grad_out, None);
    let of_scores = exact.scores.expect("the case has scores");
    let mut grads = results.grads;
    let Gradients { q, k, v, scores } = &mut grads;
    for (actual, exact) in [
        (q, exact.q),
        (k, exact.k),
        (v, exact.v),
        (scores, of_scores),
    ] {
        let actual = actual.as_mut().expect("every gradient is computed");
        for (actual, exact) in actual.iter_mut().zip(exact.values) {
            if any_kind && !exact.is_finite() && !actual.is_finite() {
                *actual = exact;
            }
        }
    }
    case.check_gradients(grads, false);
}

#[test]
fn empty_tensors_have_defined_results() {
    for scores in [Some(Scores::Normal), None] {
        for sizes in [[2, 2, 1, 3, 0, 8], [2, 2, 1, 0, 3, 8], [0, 2, 1, 4, 3, 8]] {
            let options = AttentionOptions::new();
            let case = Case::new(sizes, scores, ElementType::F32, options, 1);
            let p = case.problem();
            let zeros = |shape: &[usize]| vec![0.0; shape.iter().product()];
            let Results {
                out, lse, grads, ..
            } = run(&case, false, RankLearning::None);
            case.check_forward(out.clone(), lse.clone());
            assert_eq!(values(out), zeros(&p.q_shape()));
            assert!(values(lse).iter().all(|&x| x == f64::NEG_INFINITY));
            assert_eq!(grads.q.unwrap(), zeros(&p.q_shape()));
            assert_eq!(grads.k.unwrap(), zeros(&p.kv_shape()));
            assert_eq!(grads.v.unwrap(), zeros(&p.kv_shape()));
            assert_eq!(grads.scores, scores.map(|_| zeros(&p.scores_shape())));
        }
    }
}
