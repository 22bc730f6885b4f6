//! q, k and v from one product: the parts, their gradients, and the layer that makes them.

use crate::case::{grad, near, random, recording, refused_as, values};
use crate::layer::{self, Groups};
use burn::module::Param;
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttention, Rope};
use burn_flash_dma::{split_heads, try_split_heads};

/// Bit for bit those of slices, whichever parts the loss depends on.
#[test]
fn parts_and_their_gradients_are_those_of_slices() {
    let plain = Device::flex();
    let (stored, weights) = (random([2, 5, 7, 8], &plain), random([2, 5, 7, 8], &plain));
    let (stored, weights) = (stored.into_data(), weights.into_data());
    let heads = [4, 2, 1];
    for device in recording() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            for used in [[true; 3], [true, false, true], [false, true, false]] {
                let run = |ours: bool| {
                    let load = |data| Tensor::<4>::from_data(data, (&device, dtype));
                    let x = load(stored.clone()).require_grad();
                    let weights = load(weights.clone());
                    let inner = x.clone() * 0.5;
                    let slice = |(at, n)| inner.clone().narrow(2, at, n);
                    let parts = match ours {
                        true => split_heads(inner, heads),
                        false => [(0, 4), (4, 2), (6, 1)].map(slice),
                    };
                    let results = parts.clone().map(values);
                    let mut loss = Tensor::<1>::zeros([1], (&device, dtype));
                    let slopes = split_heads(weights, heads);
                    for ((part, slope), used) in parts.into_iter().zip(slopes).zip(used) {
                        if used {
                            loss = loss + (part * slope).sum();
                        }
                    }
                    (results, grad(&x, &loss.backward()))
                };
                assert!(run(true) == run(false), "{dtype:?} {used:?}");
            }
        }
    }
}

#[test]
fn other_numbers_of_heads_are_refused_and_empty_parts_are_empty() {
    let device = Device::flex().autodiff();
    let x = random([2, 5, 7, 8], &device).require_grad();
    let two = try_split_heads(x.clone(), [4, 2]);
    refused_as(two, "x must have size 6 on axis 2, but has 7");
    let [none, all] = split_heads(x.clone(), [0, 7]);
    assert_eq!(none.dims(), [2, 5, 0, 8]);
    let gradient = grad(&x, &(all * 3.0).sum().backward());
    assert!(gradient.iter().all(|&slope| slope == 3.0));
    let parts = split_heads(random([2, 0, 7, 8], &device), [3, 4]);
    assert_eq!(parts.map(|part| part.dims()), [[2, 0, 3, 8], [2, 0, 4, 8]]);
}

/// A zero bias changes nothing except that every projection is a product of its own; few tokens do the same.
#[test]
fn a_layer_of_one_product_is_a_layer_of_three() {
    let device = Device::flex().autodiff();
    let config = layer::config().selection(|s| s.with_window(Some(6)));
    let layer = config.with_rope(Some(Rope::new(64))).init(&device);
    let mut apart = layer.clone();
    let zeros = |width| Some(Param::from_tensor(Tensor::zeros([width], &device)));
    apart.q_proj.bias = zeros(32);
    apart.k_proj.bias = zeros(16);
    apart.v_proj.bias = zeros(16);

    let all = random([2, 20, 32], &device).into_data();
    let slopes = random([2, 20, 32], &device).into_data();
    let run = |layer: &DynamicMaskAttention| {
        let x = Tensor::<3>::from_data(all.clone(), &device).require_grad();
        let out = layer.forward(x.clone());
        let loss = (out.clone() * Tensor::from_data(slopes.clone(), &device)).sum();
        let grads = loss.backward();
        let weights = [&layer.q_proj, &layer.k_proj, &layer.v_proj];
        let [q, k, v] = weights.map(|projection| grad(&projection.weight.val(), &grads));
        [values(out), grad(&x, &grads), q, k, v]
    };
    for (one, three) in run(&layer).iter().zip(run(&apart)) {
        near(one, &three, 1e-5, "one product");
    }
    // A sequence of fewer tokens than features gives the beginning of the longer one.
    let whole = layer.forward(Tensor::<3>::from_data(all.clone(), &device));
    let start_of = |tensor: Tensor<3>| tensor.narrow(0, 0, 1).narrow(1, 0, 9);
    let start = layer.forward(start_of(Tensor::from_data(all, &device)));
    near(&values(start), &values(start_of(whole)), 1e-5, "the start");
}
