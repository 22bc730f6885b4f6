//! Gradients on Flex: against the oracle, for every subset of tracked inputs, through the LSE, and
//! with gradient checkpointing.

use crate::case::{Case, ELEMENTS, Tensors, cases, close, grad, loss, tensor, values};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::{AttentionOptions, ElementType, dynamic_mask_attention, zoh_scores};
use flash_dma_reference::generate::Scores;

const ALL: [bool; 4] = [true; 4];

fn sample() -> Case {
    let options = AttentionOptions::new().with_keep_window(6);
    let (options, sizes) = (options.with_softcap(3.0), [2, 4, 2, 21, 21, 16]);
    Case::new(sizes, Some(Scores::Normal), ElementType::F32, options, 7)
}

#[test]
fn gradients_match_the_oracle() {
    for case in cases(&ELEMENTS) {
        let tensors = case.tensors(&Device::flex().autodiff()).track(ALL);
        let grads = case.loss(&tensors, false).backward();
        case.check_gradients(tensors.gradients(&grads), false);
    }
}

#[test]
fn gradients_through_out_and_lse_match_the_oracle() {
    for case in cases(&ELEMENTS) {
        case.check(&Device::flex().autodiff());
    }
}

/// A loss of only one output: the other's gradient is zero.
#[test]
fn either_output_may_be_unused() {
    let device = Device::flex().autodiff();
    let case = sample();
    let tensors = case.tensors(&device).track(ALL);
    let (out, _) = tensors.attend_with_lse(case.options);
    let grads = loss(out, case.grad_out(&device)).backward();
    case.check_gradients(tensors.gradients(&grads), false);

    let mut case = sample();
    let tensors = case.tensors(&device).track(ALL);
    let (_, lse) = tensors.attend_with_lse(case.options);
    let grads = loss(lse, case.grad_lse(&device)).backward();
    case.grad_out.fill(0.0);
    case.check_gradients(tensors.gradients(&grads), true);
}

#[test]
fn exactly_the_tracked_inputs_get_gradients() {
    let case = sample();
    let run = |flags, with_lse| {
        let tensors = case.tensors(&Device::flex().autodiff()).track(flags);
        tensors.gradients(&case.loss(&tensors, with_lse).backward())
    };
    for with_lse in [false, true] {
        let all = run(ALL, with_lse);
        for subset in 1..16u8 {
            let flags = [0, 1, 2, 3].map(|bit| subset >> bit & 1 == 1);
            let grads = run(flags, with_lse);
            let pairs = [
                (grads.q, &all.q),
                (grads.k, &all.k),
                (grads.v, &all.v),
                (grads.scores, &all.scores),
            ];
            for ((grad, all), tracked) in pairs.into_iter().zip(flags) {
                let all = all.as_ref().unwrap();
                assert_eq!(grad.as_ref(), tracked.then_some(all), "{flags:?}");
            }
        }
    }
}

/// Untracked tensors of the plain device may be mixed with tracked ones.
#[test]
fn a_plain_device_mixes_with_its_autodiff_device() {
    let case = sample();
    let plain = case.tensors(&Device::flex());
    let tracked = case.tensors(&Device::flex().autodiff()).track(ALL);
    let mixed = Tensors {
        q: tracked.q.clone(),
        k: plain.k,
        v: plain.v,
        scores: tracked.scores.clone(),
    };
    let grads = case.loss(&mixed, false).backward();
    let grads = mixed.gradients(&grads);
    assert!(grads.k.is_none() && grads.v.is_none());
    case.check_gradients(grads, false);
}

/// The backward pass recomputes the parents, from operations that were not kept.
#[test]
fn gradient_checkpointing_changes_nothing() {
    let case = sample();
    let run = |device: Device, with_lse: bool| {
        let tensors = case.tensors(&device).track(ALL);
        // Memory-bound operations, whose outputs a checkpointing device drops.
        let inner = Tensors {
            q: tensors.q.clone() * 0.5 + 0.25,
            k: tensors.k.clone().exp(),
            v: (tensors.v.clone() * 2.0).tanh(),
            scores: tensors.scores.clone().map(|z| z * 3.0),
        };
        let total = if with_lse {
            let (out, lse) = inner.attend_with_lse(case.options);
            let out = out.tanh() * 2.0;
            loss(out, case.grad_out(&device)) + loss(lse, case.grad_lse(&device))
        } else {
            let out = inner.attend(case.options).tanh() * 2.0;
            loss(out, case.grad_out(&device))
        };
        tensors.gradients(&total.backward())
    };
    for with_lse in [false, true] {
        let device = Device::flex().autodiff();
        let checkpointed = run(device.clone().gradient_checkpointing(), with_lse);
        assert!(checkpointed.q.is_some());
        assert_eq!(checkpointed, run(device, with_lse));
    }
}

#[test]
fn a_tensor_in_several_roles_sums_its_gradients() {
    let device = Device::flex().autodiff();
    let options = AttentionOptions::new().with_keep_window(5);
    let sizes = [1, 2, 2, 13, 13, 8];
    let mut case = Case::new(sizes, Some(Scores::Normal), ElementType::F32, options, 2);
    case.inputs.k = case.inputs.q.clone();
    case.inputs.v = case.inputs.q.clone();
    let separate = case.tensors(&device).track(ALL);
    let grads = case.loss(&separate, false).backward();
    let grads = separate.gradients(&grads);
    let (q, k, v) = (grads.q.unwrap(), grads.k.unwrap(), grads.v.unwrap());
    let sum: Vec<f64> = (0..q.len()).map(|at| q[at] + k[at] + v[at]).collect();

    let x = case.tensors(&device).q.require_grad();
    let one = Tensors {
        q: x.clone(),
        k: x.clone(),
        v: x.clone(),
        scores: separate.scores,
    };
    let grads = case.loss(&one, false).backward();
    close(&grad(&x, &grads), &sum, 1e-6);
}

/// v reaches the output directly and through the scores.
#[test]
fn scores_of_the_values_add_both_paths_of_the_values() {
    let device = Device::flex().autodiff();
    let case = sample();
    let p = *case.problem();
    let width = p.kv_heads * p.head_dim;
    let leaf = (0..p.kv_heads * width).map(|i| f64::from(0.3 * (i as f32 * 0.7).sin()));
    let leaf: Vec<f64> = leaf.collect();
    let dt_proj = tensor(&leaf, [p.kv_heads, width], ElementType::F32, &device).require_grad();
    let a: Tensor<1> = Tensor::from_floats([-0.5, 0.75], &device).require_grad();
    let t = case.tensors(&device).track(ALL);
    let (q, k, v) = (t.q.clone(), t.k.clone(), t.v.clone());
    let scores = zoh_scores(v.clone(), dt_proj.clone(), a.clone());
    let out = dynamic_mask_attention(q, k, v, scores, case.options);
    let grads = loss(out, case.grad_out(&device)).backward();

    // By hand: the scores as a leaf, then their gradient through the ZOH alone.
    let mut split = case.tensors(&device).track(ALL);
    let scores = zoh_scores(split.v.clone(), dt_proj.clone(), a.clone());
    split.scores = Some(scores.detach().require_grad());
    let direct = case.loss(&split, false).backward();
    let upstream = split.scores.as_ref().unwrap().grad(&direct).unwrap();
    let v = case.tensors(&device).v.require_grad();
    let dt_leaf = dt_proj.clone().detach().require_grad();
    let a_leaf = a.clone().detach().require_grad();
    let zoh = zoh_scores(v.clone(), dt_leaf.clone(), a_leaf.clone());
    let upstream: Tensor<3> = Tensor::from_data(upstream.into_data(), &device);
    let indirect = (zoh * upstream).sum().backward();

    let sum = split.v.grad(&direct).unwrap() + v.grad(&indirect).unwrap();
    close(&grad(&t.v, &grads), &values(sum), 1e-5);
    for (whole, part) in [
        (grad(&dt_proj, &grads), grad(&dt_leaf, &indirect)),
        (grad(&a, &grads), grad(&a_leaf, &indirect)),
    ] {
        assert!(part.iter().any(|&x| x != 0.0));
        close(&whole, &part, 1e-5);
    }
}
