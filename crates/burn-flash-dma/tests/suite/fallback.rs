//! The default bodies, as an engine of their own: against the oracle and against Flex's engine.

use crate::case::{Case, ELEMENTS, Gradients, Tensors, cases, values};
use crate::values::{ints, oracle_intervals};
use burn::backend::Flex;
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::ops::{DynamicMaskOps, OptionalFloat, Saved, Selection};
use burn_flash_dma::{AttentionOptions, ElementType, fallback};
use flash_dma_reference::{Rng, generate::Scores};

/// What one engine makes of a case.
struct Results {
    out: Tensor<4>,
    lse: Tensor<3>,
    grads: Gradients,
}

/// The operations below the `Tensor` API, of the fallback or of Flex's engine.
fn run(case: &Case, with_lse: bool, engine: bool) -> Results {
    let device = Device::flex();
    let p = *case.problem();
    let primitive = |t: Tensor<4>| t.try_into_primitive::<Flex>().unwrap();
    let Tensors { q, k, v, scores } = case.tensors(&device);
    let [q, k, v] = [q, k, v].map(primitive);
    let selection = || match &scores {
        None => Selection::<Flex>::All,
        Some(scores) => {
            let scores = scores.clone().try_into_primitive::<Flex>().unwrap();
            let intervals = if engine {
                Flex::dynamic_mask_select(scores.clone(), p.window)
            } else {
                fallback::select::<Flex>(scores.clone(), p.window)
            };
            Selection::Scored { scores, intervals }
        }
    };
    let (out, lse) = if engine {
        Flex::dynamic_mask_forward(q.clone(), k.clone(), v.clone(), selection(), p)
    } else {
        fallback::forward::<Flex>(q.clone(), k.clone(), v.clone(), selection(), p)
    };
    let saved = Saved {
        out: out.clone(),
        lse: lse.clone(),
        grad_out: primitive(case.grad_out(&device)),
        grad_lse: if with_lse {
            OptionalFloat::Some(case.grad_lse(&device).try_into_primitive::<Flex>().unwrap())
        } else {
            OptionalFloat::None
        },
    };
    let grads = if engine {
        Flex::dynamic_mask_backward(q, k, v, selection(), saved, p)
    } else {
        fallback::backward::<Flex>(q, k, v, selection(), saved, p)
    };
    let read = |t| values(Tensor::<4>::from_primitive::<Flex>(t));
    Results {
        out: Tensor::from_primitive::<Flex>(out),
        lse: Tensor::from_primitive::<Flex>(lse),
        grads: Gradients {
            q: Some(read(grads.q)),
            k: Some(read(grads.k)),
            v: Some(read(grads.v)),
            scores: match grads.scores {
                OptionalFloat::None => None,
                OptionalFloat::Some(t) => Some(values(Tensor::<3>::from_primitive::<Flex>(t))),
            },
        },
    }
}

#[test]
fn the_default_bodies_match_the_oracle() {
    for case in cases(&ELEMENTS) {
        for with_lse in [false, true] {
            let results = run(&case, with_lse, false);
            assert_eq!(results.grads.scores.is_some(), case.problem().has_scores);
            case.check_forward(results.out, results.lse);
            case.check_gradients(results.grads, with_lse);
        }
    }
}

#[test]
fn the_default_selection_is_exact() {
    let device = Device::flex();
    let mut rng = Rng::new(4);
    for round in 0..200u64 {
        let kind = Scores::ALL[round as usize % Scores::ALL.len()];
        let len = 1 + rng.below(70);
        let window = 1 + rng.below(len + 3);
        let options = AttentionOptions::new().with_keep_window(window);
        let sizes = [1, 2, 2, len, len, 8];
        let case = Case::new(sizes, Some(kind), ElementType::F32, options, round);
        let scores = case.tensors(&device).scores.unwrap();
        let scores = scores.try_into_primitive::<Flex>().unwrap();
        for intervals in [
            fallback::select::<Flex>(scores.clone(), window),
            Flex::dynamic_mask_select(scores, window),
        ] {
            let intervals = Tensor::<4, Int>::from_primitive::<Flex>(intervals);
            assert_eq!(intervals.dims(), case.problem().intervals_shape());
            assert_eq!(
                ints(intervals),
                oracle_intervals(&case, window),
                "{}",
                case.name
            );
        }
    }
}

/// NaN and infinities in single elements of every input reach the outputs they touch, and those
/// only, on both engines.
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
                let forward = case.inputs.forward();
                let backward = case.inputs.backward(&case.grad_out, None);
                for engine in [false, true] {
                    let results = run(&case, false, engine);
                    let what = format!("{value} in tensor {role}, window {window}, {engine}");
                    same(&what, &values(results.out), &forward.out.values);
                    same(&what, &values(results.lse), &forward.lse.values);
                    let grads = results.grads;
                    let what = format!("gradients with {what}");
                    same(&what, &grads.q.unwrap(), &backward.q.values);
                    same(&what, &grads.k.unwrap(), &backward.k.values);
                    same(&what, &grads.v.unwrap(), &backward.v.values);
                    let exact = backward.scores.as_ref().unwrap();
                    same(&what, &grads.scores.unwrap(), &exact.values);
                }
            }
        }
    }
}

/// NaN and each infinity at the same places, the rest close. (The oracle's rule bounds an error by
/// the size of an element's terms, which is no bound next to an infinite logit.) `delta` may be
/// summed over the features or over the keys, which differ in NaN and infinity where an incoming
/// gradient is infinite: there a gradient only must not be finite.
fn same(what: &str, actual: &[f64], exact: &[f64]) {
    assert_eq!(actual.len(), exact.len());
    let finite = exact.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1.0, |max: f64, x| max.max(x.abs()));
    for (at, (&a, &e)) in actual.iter().zip(exact).enumerate() {
        let equal = if e.is_finite() {
            (a - e).abs() <= 1e-5 * scale
        } else {
            a == e || (a.is_nan() && e.is_nan()) || (what.starts_with("grad") && !a.is_finite())
        };
        assert!(equal, "{what}: element {at} is {a} instead of {e}");
    }
}

#[test]
fn empty_tensors_have_defined_results() {
    for scores in [Some(Scores::Normal), None] {
        for sizes in [[2, 2, 1, 3, 0, 8], [2, 2, 1, 0, 3, 8], [0, 2, 1, 4, 3, 8]] {
            let options = AttentionOptions::new();
            let case = Case::new(sizes, scores, ElementType::F32, options, 1);
            let p = case.problem();
            let zeros = |shape: &[usize]| vec![0.0; shape.iter().product()];
            for engine in [false, true] {
                let Results { out, lse, grads } = run(&case, false, engine);
                assert_eq!(values(out), zeros(&p.q_shape()));
                assert!(values(lse).iter().all(|&x| x == f64::NEG_INFINITY));
                assert_eq!(grads.q.unwrap(), zeros(&p.q_shape()));
                assert_eq!(grads.k.unwrap(), zeros(&p.kv_shape()));
                assert_eq!(grads.v.unwrap(), zeros(&p.kv_shape()));
                assert_eq!(grads.scores, scores.map(|_| zeros(&p.scores_shape())));
            }
        }
    }
}
