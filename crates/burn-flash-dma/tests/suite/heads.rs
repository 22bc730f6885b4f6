//! q, k and v of one product: the parts and their gradients, and the layer that makes them so.

use crate::case::values;
use burn::module::Param;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig};
use burn_flash_dma::{AttentionError, TensorName, split_heads, try_split_heads};

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// Those of slices, bit by bit, whichever parts the loss depends on.
#[test]
fn parts_and_their_gradients_are_those_of_slices() {
    let plain = Device::flex();
    let (stored, weights) = (random([2, 5, 7, 8], &plain), random([2, 5, 7, 8], &plain));
    let (stored, weights) = (stored.into_data(), weights.into_data());
    let heads = [4, 2, 1];
    for device in [
        plain.clone().autodiff(),
        plain.autodiff().gradient_checkpointing(),
    ] {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            for used in [
                [true, true, true],
                [true, false, true],
                [false, true, false],
            ] {
                let run = |ours: bool| {
                    let load = |data| Tensor::<4>::from_data(data, (&device, dtype));
                    let x = load(stored.clone()).require_grad();
                    let weights = load(weights.clone());
                    let inner = x.clone() * 0.5;
                    let parts = match ours {
                        true => split_heads(inner, heads),
                        false => {
                            [(0, 4), (4, 2), (6, 1)].map(|(at, n)| inner.clone().narrow(2, at, n))
                        }
                    };
                    let results = parts.clone().map(values);
                    let mut loss = Tensor::<1>::zeros([1], (&device, dtype));
                    let slopes = split_heads(weights, heads);
                    for ((part, slope), used) in parts.into_iter().zip(slopes).zip(used) {
                        if used {
                            loss = loss + (part * slope).sum();
                        }
                    }
                    (results, values(x.grad(&loss.backward()).expect("tracked")))
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
    assert_eq!(
        try_split_heads(x.clone(), [4, 2]).unwrap_err(),
        AttentionError::Shape {
            tensor: TensorName::Tokens,
            axis: 2,
            expected: 6,
            actual: 7
        }
    );
    let [none, all] = split_heads(x.clone(), [0, 7]);
    assert_eq!(none.dims(), [2, 5, 0, 8]);
    let gradient = x.grad(&(all * 3.0).sum().backward()).expect("tracked");
    assert!(values(gradient).iter().all(|&slope| slope == 3.0));
    let parts = split_heads(random([2, 0, 7, 8], &device), [3, 4]);
    assert_eq!(parts.map(|part| part.dims()), [[2, 0, 3, 8], [2, 0, 4, 8]]);
}

/// A bias of zeros changes nothing but that every projection is a product of its own; so do few tokens.
#[test]
fn a_layer_of_one_product_is_a_layer_of_three() {
    let device = Device::flex().autodiff();
    let layer = DynamicMaskAttentionConfig::new(32, 4)
        .with_n_kv_heads(Some(2))
        .with_keep_window(Some(6))
        .with_max_seq_len(Some(64))
        .init(&device);
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
        let of = |weight: &Param<Tensor<2>>| values(weight.grad(&grads).expect("tracked"));
        let weights = [&layer.q_proj, &layer.k_proj, &layer.v_proj].map(|p| of(&p.weight));
        let [q, k, v] = weights;
        [
            values(out),
            values(x.grad(&grads).expect("tracked")),
            q,
            k,
            v,
        ]
    };
    for (one, three) in run(&layer).into_iter().zip(run(&apart)) {
        assert_eq!(one.len(), three.len());
        for (a, b) in one.into_iter().zip(three) {
            assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{a} is not {b}");
        }
    }
    // A sequence whose tokens are fewer than features reads as the beginning of the longer one.
    let whole = layer.forward(Tensor::<3>::from_data(all.clone(), &device));
    let start = Tensor::<3>::from_data(all, &device)
        .narrow(0, 0, 1)
        .narrow(1, 0, 9);
    let (start, whole) = (
        values(layer.forward(start)),
        values(whole.narrow(0, 0, 1).narrow(1, 0, 9)),
    );
    for (a, b) in start.into_iter().zip(whole) {
        assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{a} is not {b}");
    }
}
