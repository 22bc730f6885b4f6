//! A few problems through Burn on CubeCL's CPU runtime with fusion. The engine itself is tested without Burn; these
//! test the strides, the metadata and the graph.

use crate::case::{
    Case, ELEMENTS, Tensors, alone, grad, ints, normal, random, refused, size, values, within,
};
use crate::values::oracle_intervals;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_flash_dma::{
    Attention, AttentionError, AttentionMask, AttentionOptions, ElementType, KeyRanges,
    MaskedAttention, TensorName, TilePlan, select, split_heads, split_qkv,
    try_dynamic_mask_attention,
};
use cubecl::logging::{
    Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest,
};
use flash_dma_reference::{Rng, generate::Scores};
use std::sync::{Arc, Mutex};

fn sample(scores: Scores, element: ElementType) -> Case {
    let options = AttentionOptions::new()
        .with_keep_window(5)
        .with_softcap(4.0);
    Case::new([2, 4, 2, 19, 27, 16], Some(scores), element, options, 3)
}

#[test]
fn fused_neighbours_and_strided_inputs() {
    let _alone = alone();
    for element in ELEMENTS {
        let case = sample(Scores::Padded, element);
        let Tensors { q, k, v, scores } = case.tensors(&Device::cpu());
        // A transpose of packed data, and elementwise work before and after the operation.
        let packed = |t: Tensor<4>| (t.swap_dims(1, 2) * 2.0).swap_dims(1, 2) / 2.0;
        let tensors = Tensors {
            q: packed(q),
            k: packed(k),
            v: packed(v),
            scores,
        };
        let (out, lse) = tensors.attend_with_lse(case.options);
        let moved = (out.clone() + 1.0) * 2.0;
        case.check_forward(out.clone(), lse);
        assert_eq!(values(moved), values((out + 1.0) * 2.0));
    }
}

#[test]
fn selection_matches_the_oracle() {
    let _alone = alone();
    for kind in [Scores::Ties, Scores::Padded, Scores::Nan] {
        let options = AttentionOptions::new().with_keep_window(7);
        let sizes = [2, 2, 2, 70, 70, 8];
        let case = Case::new(sizes, Some(kind), ElementType::F32, options, 1);
        let scores = case.tensors(&Device::cpu()).scores.unwrap();
        let intervals = select(scores, 7).into_tensor();
        assert_eq!(intervals.dims(), case.problem().intervals_shape());
        assert_eq!(ints(intervals), oracle_intervals(&case, 7), "{}", case.name);
    }
}

#[test]
fn gradients_match_the_oracle() {
    let _alone = alone();
    let device = Device::cpu().autodiff();
    for (element, with_lse) in [(ElementType::F32, true), (ElementType::Bf16, false)] {
        let case = sample(Scores::Nan, element);
        let tensors = case.tensors(&device).track([true; 4]);
        let grads = case.loss(&tensors, with_lse).backward();
        case.check_gradients(tensors.gradients(&grads), with_lse);
    }
    // Plain attention, with only k tracked.
    let options = AttentionOptions::new();
    let case = Case::new([1, 2, 1, 9, 9, 8], None, ElementType::F32, options, 6);
    let tensors = case.tensors(&device).track([false, true, false, false]);
    let grads = case.loss(&tensors, false).backward();
    let grads = tensors.gradients(&grads);
    assert!(grads.q.is_none() && grads.v.is_none());
    case.check_gradients(grads, false);
}

#[test]
fn empty_tensors_have_defined_results() {
    let _alone = alone();
    for scores in [Some(Scores::Normal), None] {
        let options = AttentionOptions::new();
        for sizes in [[2, 2, 1, 3, 0, 8], [2, 2, 1, 0, 3, 8], [0, 2, 1, 4, 3, 8]] {
            let case = Case::new(sizes, scores, ElementType::F32, options, 1);
            let (out, lse) = case.tensors(&Device::cpu()).attend_with_lse(options);
            assert_eq!(out.dims(), case.problem().q_shape());
            assert!(values(out).iter().all(|&x| x == 0.0));
            assert!(values(lse).iter().all(|&x| x == f64::NEG_INFINITY));
        }
    }
}

#[test]
fn tensors_of_two_devices_are_refused() {
    let _alone = alone();
    let options = AttentionOptions::new();
    let case = sample(Scores::Normal, ElementType::F32);
    let Tensors { q, k, v, .. } = case.tensors(&Device::flex());
    let other = case.tensors(&Device::cpu());
    let tensor = TensorName::Key;
    let error = Attention::new(q.clone(), other.k, v.clone())
        .options(options)
        .try_forward()
        .unwrap_err();
    assert_eq!(error, AttentionError::Device { tensor });
    let (tensor, scores) = (TensorName::Scores, other.scores.unwrap());
    let error = try_dynamic_mask_attention(q, k, v, scores, options).unwrap_err();
    assert_eq!(error, AttentionError::Device { tensor });
    let keys = |device| Tensor::<3, Int>::zeros([1, 1, 1], &device);
    let ranges = KeyRanges::new(keys(Device::flex()), keys(Device::cpu()));
    let plan = TilePlan::try_from_ranges(ranges, [3, 3], true);
    refused(plan, "RangesDevice");
}

/// Masks of either polarity and biases with strides of 0, against Flex: values, the plan and all gradients.
#[test]
fn masks_and_biases_through_fusion() {
    let _alone = alone();
    let run = |device: Device| {
        let device = device.autodiff();
        let load =
            |shape: [usize; 4], seed| normal(&mut Rng::new(seed), shape, &device).require_grad();
        let q = load([2, 4, 19, 16], 1);
        let [k, v] = [2, 3].map(|seed| load([2, 2, 70, 16], seed));
        let bias = load([1, 2, 1, 70], 4);
        let mask = load([2, 1, 19, 70], 5).inner().greater_elem(0.5);
        let mask = AttentionMask::hidden(mask);
        let plan = TilePlan::new(mask, [19, 70], true);
        let wide = (bias.clone() * 2.0).expand([1, 2, 19, 70]);
        let options = AttentionOptions::new();
        let out = MaskedAttention::new(q.clone() * 2.0, k.clone(), v.clone())
            .plan(&plan)
            .bias(wide)
            .options(options)
            .forward();
        let grads = (out.clone() * out.clone()).sum().backward();
        let counts = plan.counts().clone().into_data_as::<i32>();
        let mut all = vec![values(out.inner()), counts.iter::<f64>().collect()];
        all.extend([&q, &k, &v, &bias].map(|t| grad(t, &grads)));
        all
    };
    for (cube, flex) in run(Device::cpu()).iter().zip(run(Device::flex())) {
        within(cube, &flex, 1e-5 * size(&flex).max(1.0), "cube");
    }
}

/// A 16-bit bias equals the f32 bias of the same numbers, repeated by strides of 0 or not.
#[test]
fn biases_of_16_bits() {
    let _alone = alone();
    let device = Device::cpu().autodiff();
    let q = random([1, 2, 9, 8], &device);
    let [k, v] = [(); 2].map(|()| random([1, 1, 40, 8], &device));
    for (shape, wide) in [
        ([1, 1, 1, 40], [1, 2, 9, 40]),
        ([1, 2, 9, 40], [1, 2, 9, 40]),
    ] {
        let narrow = random(shape, &device).cast(DType::BF16);
        let [half, full] = [DType::BF16, DType::F32].map(|dtype| {
            let bias = narrow.clone().cast(dtype).detach().require_grad();
            let (q, k, v) = (q.clone(), k.clone(), v.clone());
            let repeated = Some(bias.clone().expand(wide));
            let out = MaskedAttention::new(q, k, v).bias(repeated).forward();
            let grads = out.clone().powi_scalar(2).sum().backward();
            let grad = bias.grad(&grads).unwrap();
            assert_eq!((grad.dims(), grad.dtype()), (shape, dtype));
            (values(out.inner()), values(grad))
        });
        assert!(half.0 == full.0);
        // 18 roundings to 8 bits, of repeated values.
        within(&half.1, &full.1, 18.0 * size(&full.1) / 256.0, "bias");
    }
}

/// Names of launched kernels.
#[derive(Default)]
struct Launched(Mutex<Vec<&'static str>>);

impl LaunchObserver for Launched {
    fn launched(&self, kernel: &'static str) {
        self.0.lock().expect("no holder panics").push(kernel);
    }

    fn timing(&self) -> TimingRequest {
        TimingRequest::None
    }

    fn profiled(&self, _kernel: &'static str, _profile: ProfileDuration) {}

    fn timed(&self, _kernel: &'static str, _duration: Duration, _method: TimingMethod) {}
}

/// Kernels launched to read a tensor.
fn launches<const D: usize>(read: &dyn Fn() -> Tensor<D>) -> String {
    let launched = Arc::new(Launched::default());
    let observation = LaunchObservation::new(launched.clone());
    let _ = values(read());
    drop(observation);
    let kernels = launched.0.lock().expect("no holder panics");
    kernels.join(" ").to_lowercase()
}

/// The parts of a packed tensor and their gradients are views, as long as only attention reads them.
#[test]
fn parts_of_a_packed_tensor_are_not_copied() {
    let _alone = alone();
    let qkv = random([1, 6, 3, 2, 32], &Device::cpu().autodiff()).require_grad();
    let _ = values(qkv.clone());
    let gradient = |read_again: bool| {
        launches(&|| {
            let [q, k, v] = split_qkv(qkv.clone());
            let out = Attention::new(q, k.clone(), v)
                .try_forward()
                .expect("they fit");
            let mut loss = out.sum();
            if read_again {
                loss = loss + k.sum();
            }
            qkv.grad(&loss.backward()).expect("tracked")
        })
    };
    let kernels = gradient(false);
    assert!(kernels.contains("dkdv"), "{kernels}");
    assert!(!kernels.contains("slice"), "{kernels}");
    // A kernel that concatenates the parts would show.
    let kernels = gradient(true);
    assert!(kernels.contains("slice"), "{kernels}");
}

/// q, k and v of one product are views of it, which the next operations read in place.
#[test]
fn parts_of_a_product_are_not_copied() {
    let _alone = alone();
    let x = random([1, 20, 8, 32], &Device::cpu());
    // Makes the operands, so that only their readers are launched later.
    let _ = values(x.clone());
    let options = AttentionOptions::new();
    let kernels = launches(&|| {
        let parts = split_heads(x.clone(), [4, 2, 2]);
        let [q, k, v] = parts.map(|part| part.swap_dims(1, 2));
        Attention::new(q, k, v)
            .options(options)
            .try_forward()
            .expect("they fit")
    });
    // The next operation reads the result.
    let first = kernels.split(' ').next().unwrap_or_default();
    assert!(first.contains("forward"), "{kernels}");
    // A part that begins off the alignment is a copy, which shows.
    let kernels = launches(&|| x.clone().narrow(3, 1, 8) * 2.0);
    assert!(kernels.contains("slice"), "{kernels}");
}
